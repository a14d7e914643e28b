"""Imports ahead of time what devices and their jobs need.

torch imports some of itself on first use (sympy in the first backward pass with a cotangent, its
compiler with the first kernel on meta tensors, as every loss is checked: 0.7 s and 1.1 s of
processor time), and a builder's package comes with its first model. Of the models file only the
names of the builders are used: no model is built, no file of the owner's is run, no device is
opened.
"""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from gradbox_worker.errors import ModelsFileError
from gradbox_worker.models import read_models_file
from gradbox_worker.models.models_file import Builder

OF_DEVICES: Final = "gradbox_worker.device.serving"
OF_JOBS: Final = (
    "torch.fx.experimental.symbolic_shapes",
    "torch._dynamo",
    "gradbox.graphs.call_signature",
)
OF_BUILDERS: Final[Mapping[Builder, tuple[str, ...]]] = {
    "hf": ("transformers.modeling_utils", "transformers.models.auto.modeling_auto"),
    "torchvision": ("torchvision.models",),
    "timm": ("timm",),
    "python": (),
}
# How many threads OpenBLAS starts when it is loaded, unless it was built for OpenMP as torch's is.
OPENBLAS_THREADS: Final = "OPENBLAS_NUM_THREADS"


def import_for_jobs() -> None:
    """Import what jobs need, in a process that has nothing else to do yet.

    All that is there by then is left out of garbage collection: a full one would look at 300,000
    objects, which takes 0.2 s of some job's time. `Registry.drop_idle` puts it back.
    """
    for name in OF_JOBS:
        importlib.import_module(name)
    gc.freeze()


def import_for_devices(models_file: Path) -> None:
    """Import what a device process needs before it is ready, and start no thread.

    What cannot be imported for a builder is said when a model needs it.
    """
    with _one_blas_thread():
        importlib.import_module(OF_DEVICES)
        for builder in _builders_of(models_file):
            for name in OF_BUILDERS[builder]:
                with suppress(ImportError):
                    importlib.import_module(name)


def _builders_of(models_file: Path) -> list[Builder]:
    try:
        return sorted({entry.builder for entry in read_models_file(models_file).values()})
    except ModelsFileError:
        return []  # a device reads the file again, and says what is wrong with it


@contextmanager
def _one_blas_thread() -> Iterator[None]:
    """Have what is imported meanwhile compute by OpenBLAS on the thread that calls it."""
    before = os.environ.get(OPENBLAS_THREADS)
    os.environ[OPENBLAS_THREADS] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[OPENBLAS_THREADS]
        else:
            os.environ[OPENBLAS_THREADS] = before
