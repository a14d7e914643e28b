"""The losses that gradbox carries, on the box and on the laptop.

`signatures` says what each takes, without torch, so that the service can refuse a wrong job;
`functions` computes them. `gradbox.losses` is their public name.
"""
