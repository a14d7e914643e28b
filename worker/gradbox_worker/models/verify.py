"""Checks that a model of the models file can be served, and is what it was when registered.

It is built twice: a builder that draws random weights of its own gives another model each time.
"""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass
from typing import Any

from gradbox.html import size
from gradbox.protocol import ModelView
from gradbox_worker.errors import ModelsFileError
from gradbox_worker.models.builders import build_with_code
from gradbox_worker.models.describe import describe_model
from gradbox_worker.models.failures import building
from gradbox_worker.models.models_file import ModelEntry, Registered
from gradbox_worker.models.version import model_version, weights_digest


@dataclass(frozen=True)
class Verdict:
    """What came of building one model.

    Attributes:
        problem: why it cannot be served, or is not what was registered; None if all is well.
        changed: whether the problem is that it has changed.
    """

    name: str
    view: ModelView | None = None
    found: Registered | None = None
    build_s: float = 0.0
    problem: str | None = None
    changed: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        view = self.view
        methods = {} if view is None else view.methods
        return {
            "name": self.name,
            "version": None if view is None else view.version,
            "weights": None if self.found is None else self.found.weights,
            "num_parameters": None if view is None else view.num_parameters,
            "size_bytes": None if view is None else view.size_bytes,
            "methods": {name: method.arguments for name, method in methods.items()},
            "build_s": round(self.build_s, 3),
            "problem": self.problem,
            "changed": self.changed,
        }

    def lines(self) -> list[str]:
        """Return what is printed for a person."""
        if self.view is None:
            return [f"{self.name}: NOT USABLE: {self.problem}"]
        view = self.view
        weights, both = size(view.size_bytes), size(2 * view.size_bytes)
        calls = [
            f"  call        {method}({', '.join(call.arguments)})"
            for method, call in view.methods.items()
        ]
        example = "found" if view.example else "none found: users write their own inputs"
        return [
            f"{self.name}: {f'CHANGED: {self.problem}' if self.changed else 'usable'}",
            f"  version     {view.version}",
            f"  parameters  {view.num_parameters:,} in {len(view.parameters)} tensors",
            f"  memory      {weights} of weights, {both} with their gradients",
            *calls,
            f"  example     {example}",
            f"  built in    {self.build_s:.1f} s, and again to the same version",
        ]


def verify_model(entry: ModelEntry) -> Verdict:
    """Build a model twice, try it, and compare it with what was registered.

    What it prints meanwhile goes to stderr.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return _verified(entry)
    except ModelsFileError as error:
        return Verdict(entry.name, problem=str(error))


def _verified(entry: ModelEntry) -> Verdict:
    began = time.perf_counter()
    view, found = building(entry, lambda: _described(entry))
    build_s = time.perf_counter() - began
    again = building(entry, lambda: _version(entry))
    if again != found.version:
        raise ModelsFileError(
            f"models.{entry.name}: expected the same model each time it is built, got versions "
            f"{found.version[:12]}… and {again[:12]}…: its builder draws random weights of its "
            f"own; name a safetensors file with weights, or seed what it draws from"
        )
    problem = _change(entry, found)
    return Verdict(entry.name, view, found, build_s, problem, changed=problem is not None)


def _described(entry: ModelEntry) -> tuple[ModelView, Registered]:
    model, code = build_with_code(entry)  # gone on return: two large ones need not fit at once
    version = model_version(model, code=code)
    found = Registered(version=version, weights=weights_digest(model))
    return describe_model(entry, model, version=version), found


def _version(entry: ModelEntry) -> str:
    model, code = build_with_code(entry)
    return model_version(model, code=code)


def _change(entry: ModelEntry, found: Registered) -> str | None:
    before = entry.registered
    if before is None or before.version == found.version:
        return None
    what = (
        "its weights are the same; its code, its configuration or a package it is made of is not"
        if before.weights == found.weights
        else "its weights are others"
    )
    return (
        f"registered as version {before.version[:12]}…, now {found.version[:12]}…: {what}; "
        f"if that is meant, run `gradbox models verify --accept`"
    )
