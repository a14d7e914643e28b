"""The dashboard in a real browser. `python -m tests.dashboard` takes the picture in the README."""
