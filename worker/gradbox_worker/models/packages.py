"""The packages that builders need, each imported only where a model asks for it."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from gradbox_worker.errors import ModelsFileError
from gradbox_worker.models.models_file import ModelEntry


def package(entry: ModelEntry, name: str) -> Any:
    """Import a package that an entry's builder needs.

    Raises:
        ModelsFileError: it is not installed, or was built for another torch than this one.
    """
    top = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ModelsFileError(
            f"models.{entry.name}: builder {entry.builder!r} expects the package {top!r}, "
            f"which cannot be imported ({error}); pip install {top}"
        ) from error
    except (RuntimeError, OSError) as error:
        # What torchvision raises beside a torch that it was not compiled for.
        raise ModelsFileError(
            f"models.{entry.name}: builder {entry.builder!r} expects the package {top!r}, which is "
            f"installed and does not load beside torch {torch.__version__} ({error}); install the "
            f"torchvision that was built for this torch: https://pytorch.org/get-started"
        ) from error
