"""The kinds of loss that are no function."""

from __future__ import annotations

from gradbox.protocol.parts import Scalar


class Builtin:
    """A loss that the box carries: `Builtin("info_nce", temperature=0.05)`.

    `gradbox.losses` lists them; they need no torch on this side.
    """

    def __init__(self, name: str, /, **options: Scalar) -> None:
        self.name = name
        self.options = options

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"Builtin({self.name!r}{options})"
