"""Checks that a model of the models file can be served: it builds, and builds the same twice."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from gradbox.protocol import ModelView
from gradbox_worker.errors import ModelsFileError
from gradbox_worker.exceptions_to_problems import Caught, caught
from gradbox_worker.models.builders import build_model, source_code_digest
from gradbox_worker.models.describe import describe_model
from gradbox_worker.models.models_file import ModelEntry
from gradbox_worker.models.version import model_version


@dataclass(frozen=True)
class Verdict:
    """What came of building one model; `problem` is None if it can be served."""

    name: str
    version: str | None = None
    num_parameters: int | None = None
    methods: dict[str, list[str]] | None = None
    problem: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        if self.problem is not None:
            return f"{self.name}: NOT USABLE: {self.problem}"
        calls = ", ".join(
            f"{method}({', '.join(names)})" for method, names in (self.methods or {}).items()
        )
        return f"{self.name}: version {self.version}, {self.num_parameters} parameters, {calls}"


def verify_model(entry: ModelEntry) -> Verdict:
    """Build a model twice and compare."""
    view = caught(lambda: _built_twice(entry), doing=f"the model {entry.name!r}")
    if isinstance(view, Caught):
        return Verdict(entry.name, problem=view.problem.detail)
    return Verdict(
        entry.name,
        version=view.version,
        num_parameters=view.num_parameters,
        methods={name: method.arguments for name, method in view.methods.items()},
    )


def _built_twice(entry: ModelEntry) -> ModelView:
    code = source_code_digest(entry)
    model = build_model(entry)
    version = model_version(model, code=code)
    view = describe_model(entry, model, version=version)
    del model  # two large models need not fit at once
    again = model_version(build_model(entry), code=code)
    if again != version:
        raise ModelsFileError(
            f"models.{entry.name}: expected the same model each time it is built, got versions "
            f"{version[:12]}… and {again[:12]}…: its builder draws random weights of its own; name "
            f"a safetensors file with weights, or seed what it draws from"
        )
    return view
