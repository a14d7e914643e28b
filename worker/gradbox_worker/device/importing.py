"""Imports ahead of time what a device process's first job would import.

torch imports some of itself on first use (sympy in the first backward pass with a cotangent: 0.7 s
of processor time), and a builder's package comes with its first model. Of the models file only the
names of the builders are used: no model is built, no file of the owner's is run, no device is
opened.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from gradbox_worker.errors import ModelsFileError
from gradbox_worker.models import read_models_file
from gradbox_worker.models.models_file import Builder

OF_EVERY_JOB: Final = "torch.fx.experimental.symbolic_shapes"
OF_JOBS: Final = (OF_EVERY_JOB, "torch._dynamo", "gradbox.graphs.call_signature")
OF_BUILDERS: Final[Mapping[Builder, tuple[str, ...]]] = {
    "hf": ("transformers.modeling_utils", "transformers.models.auto.modeling_auto"),
    "torchvision": ("torchvision.models",),
    "timm": ("timm",),
    "python": (),
}


def import_for_jobs() -> None:
    """Import what every job needs, in a process that says it is ready and waits for the first."""
    importlib.import_module(OF_EVERY_JOB)


def import_ahead(models_file: Path) -> None:
    """Import what jobs and models need, in a process that waits to take a dead one's place.

    What cannot be imported is said when a model needs it.
    """
    try:
        builders = {entry.builder for entry in read_models_file(models_file).values()}
    except ModelsFileError:
        builders = set()  # the file is read again when the process begins, and its mistake said
    for name in (
        *OF_JOBS,
        *(name for builder in sorted(builders) for name in OF_BUILDERS[builder]),
    ):
        with suppress(ImportError):
            importlib.import_module(name)
