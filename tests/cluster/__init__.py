"""A box on a real Ray cluster: what its jobs return, and what dies with what."""
