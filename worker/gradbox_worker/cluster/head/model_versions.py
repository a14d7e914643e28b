"""Whether the devices of a cluster have the same models, and the same software to run them."""

from __future__ import annotations

from collections.abc import Sequence

from gradbox.protocol import ModelView


class ModelVersions:
    """The version of each model, as the first device has it that can be used; and its software."""

    def __init__(self) -> None:
        """Know of no device."""
        self._expected: dict[str, str] = {}
        self._software = ""

    def problem(self, device: str, models: Sequence[str], *, software: str) -> str:
        """Say why a device may not be used, or "".

        Args:
            models: a `ModelView` of each, as JSON.
            software: what the receipt states of the first device, and must be true of all.
        """
        self._software = self._software or software
        if software != self._software:
            return (
                f"device {device} is refused: expected {self._software} as on the first device, "
                f"got {software}; install the same on all machines"
            )
        views = {view.name: view for view in map(ModelView.model_validate_json, models)}
        if not self._expected:
            self._expected = {n: view.version for n, view in views.items() if view.usable}
        for model, expected in self._expected.items():
            view = views.get(model)
            if view is None or view.version != expected:
                got = "none" if view is None else view.version or f"none, for {view.reason}"
                return (
                    f"device {device} is refused: expected model {model!r} at version {expected} "
                    f"as on the first device, got {got}; have the same packages on all machines, "
                    f"and what its source names"
                )
        return ""
