"""Functions as graphs of allowed operations: see `schema`."""
