"""Imports what jobs need before a job needs it, in a device process that has nothing else to do.

torch imports some of itself on first use (sympy in the first backward pass with a cotangent: 0.7 s
of processor time), and a builder's package comes with its first model, which a process that follows
another one loads with a job.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from gradbox_worker.errors import ModelsFileError
from gradbox_worker.models import read_models_file
from gradbox_worker.models.models_file import Builder

OF_JOBS: Final = (
    "torch.fx.experimental.symbolic_shapes",
    "gradbox.graphs.call_signature",
)
OF_BUILDERS: Final[Mapping[Builder, tuple[str, ...]]] = {
    "hf": ("transformers.modeling_utils", "transformers.models.auto.modeling_auto"),
    "torchvision": ("torchvision.models",),
    "timm": ("timm",),
    "python": (),
}


def import_for_jobs(models_file: Path | None = None) -> None:
    """Import what jobs need.

    All that is there by then is left out of garbage collection: a full one would look at 300,000
    objects, which takes 0.2 s of some job's time. `Registry.drop_idle` puts it back.

    Args:
        models_file: names the builders whose packages are imported, too; what cannot be imported
            is said when a model needs it.
    """
    for name in OF_JOBS:
        importlib.import_module(name)
    for builder in [] if models_file is None else _builders_of(models_file):
        for name in OF_BUILDERS[builder]:
            with suppress(ImportError):
                importlib.import_module(name)
    gc.freeze()


def _builders_of(models_file: Path) -> list[Builder]:
    try:
        return sorted({entry.builder for entry in read_models_file(models_file).values()})
    except ModelsFileError:
        return []  # a device reads the file again, and says what is wrong with it
