"""A job file as a whole: its keys are the arguments of a computation."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Final

from gradbox.cli.job_file import values
from gradbox.cli.job_file.files import Files
from gradbox.computations import (
    Computation,
    Cotangents,
    Forward,
    Gradient,
    Jacobian,
    MixedGradient,
    PerSampleGradient,
)
from gradbox.errors import InvalidJob
from gradbox.written_files import read_written

KINDS: Final[Mapping[str, type[Computation]]] = {
    "gradient": Gradient,
    "forward": Forward,
    "per_sample_gradient": PerSampleGradient,
    "jacobian": Jacobian,
    "mixed_gradient": MixedGradient,
}
# Keys that hold more than a plain value.
READERS: Final[Mapping[str, Callable[..., Any]]] = {
    "inputs": values.shards,
    "loss": values.loss,
    "loss_inputs": values.function_inputs,
    "penalties": values.penalties,
    "readout": values.function,
    "inner": values.function,
    "outer": values.function,
    "x": values.function_inputs,
    "y": values.function_inputs,
    "weights": values.state_dict,
    "order": values.tensor_or_group,
    "vectors": values.tensor_or_group,
}


def read_job(path: Path) -> Computation:
    """Read a job file and the files that it names.

    Raises:
        InvalidJob: it is no job; the message names the file and the key.
    """
    try:
        document = tomllib.loads(read_written(path))
    except OSError as error:
        raise InvalidJob(f"{path}: expected a job file, got: {error.strerror}") from None
    except ValueError as error:
        raise InvalidJob(f"{path}: expected TOML, got: {error}") from None
    try:
        return _computation(document, files=Files(path.parent))
    except InvalidJob as error:
        error.args = (f"{path}: {error}",)
        raise


def _computation(document: Mapping[str, Any], *, files: Files) -> Computation:
    kind = document.get("computation", "gradient")
    if kind not in KINDS:
        raise InvalidJob(f"computation: expected one of {', '.join(KINDS)}, got {kind!r}")
    known = {field.name: field for field in fields(KINDS[kind])}
    values.known(document, {"computation", *known}, key="")
    given: dict[str, Any] = {}
    for name, value in document.items():
        reader: Callable[..., Any] = READERS.get(name, values.plain)
        if name != "computation":
            given[name] = reader(value, key=name, files=files)
    continues = isinstance(given.get("loss"), Cotangents)
    for name, field in known.items():
        no_default = field.default is MISSING and field.default_factory is MISSING
        needed = no_default or (name in ("model", "inputs") and not continues)
        if needed and name not in given:
            raise InvalidJob(f"{name}: expected it in every {kind} job, found none")
    return KINDS[kind](**given)
