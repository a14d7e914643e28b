"""The house itself: what imports what, and what no file may hold."""
