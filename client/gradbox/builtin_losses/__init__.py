"""The losses that are part of gradbox, for the box and for the laptop.

`signatures` says what each takes, without torch, so that the service can refuse a wrong job;
`functions` computes them, once `shapes` has looked at what they were given. `gradbox.losses` is
their public name.
"""
