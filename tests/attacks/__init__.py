"""Attacks on a box, each with what must happen; run one by its name."""
