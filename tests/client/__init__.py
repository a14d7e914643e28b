"""The client: what it sends, what it bears, and whole jobs against a twin and a real box."""
