"""Why a model cannot be built, in words for the owner of the box.

What our own checks find is a ModelsFileError with its message already. The rest is what a model's
own code raised, or memory that ran out.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gradbox.errors import GradboxError, OutOfMemory, UnusableModel
from gradbox_worker.errors import ModelsFileError, WeightsDoNotFit
from gradbox_worker.exceptions_to_problems import (
    Caught,
    caught,
    is_out_of_memory,
    wanted_bytes,
)
from gradbox_worker.models.models_file import ModelEntry

T = TypeVar("T")


def building(entry: ModelEntry, build: Callable[[], T]) -> T:
    """Call what builds an entry's model.

    Raises:
        WeightsDoNotFit: memory ran out.
        ModelsFileError: it cannot be built, whatever was raised; the message says what to do.
    """
    wanted = 0

    def explain(error: BaseException) -> GradboxError:
        nonlocal wanted
        wanted = wanted_bytes(error)
        return _explained(entry, error)

    answer = caught(
        build,
        doing=f"building the model {entry.name!r}",
        let_through=ModelsFileError,
        explain=explain,
    )
    if not isinstance(answer, Caught):
        return answer
    if answer.problem.code == OutOfMemory.code:
        raise WeightsDoNotFit(answer.problem.detail, wanted_bytes=wanted)
    raise ModelsFileError(answer.problem.detail)


def _explained(entry: ModelEntry, error: BaseException) -> GradboxError:
    said = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"
    if is_out_of_memory(error):
        return OutOfMemory(
            f"models.{entry.name}: expected its weights to fit into the device's memory, but they "
            f'do not ({said}); register it in half precision (kwargs = {{dtype = "bfloat16"}} for '
            f"builder hf), or on a larger device"
        )
    to_do = "correct it or its kwargs"
    if isinstance(error, ModuleNotFoundError):
        to_do = "install what it imports where the box runs, or correct it"
    return UnusableModel(
        f"models.{entry.name}: {entry.builder} {entry.source!r} raised {said}{_place(error)}; "
        f"{to_do}; the worker's log has the traceback"
    )


def _place(error: BaseException) -> str:
    """Return where it was raised, below our own code: "" if our own code raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or "gradbox_worker" in Path(frames[-1].filename).parts:
        return ""
    return f" (line {frames[-1].lineno} of {frames[-1].filename}: {frames[-1].line})"
