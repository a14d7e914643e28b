"""The losses that are part of gradbox, for the box and for the laptop.

`signatures` says what each takes, without torch, so that the service can refuse a wrong job;
`functions` checks the shapes of what they are given and computes them. `gradbox.losses` is their
public name.
"""
