"""The boundary of the worker: what a model, a loss or the engine raises becomes a problem.

    raised                                        becomes
    ────────────────────────────────────────────  ──────────────────────────────────────
    out of memory, in the error or in its causes  OutOfMemory
    a GradboxError, likewise                      itself
    an EngineError                                the class that ENGINE_ERRORS pairs with it, with
                                                  a hint where one is known
    WeightsDoNotFit                               OutOfMemory
    ModelsFileError otherwise                     UnknownModel
    anything else, KeyboardInterrupt and all      JobFailed

Tracebacks go to the worker's log and never over the wire.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import torch

import gradbox_engine
from gradbox import errors
from gradbox.errors import GradboxError
from gradbox.protocol import Problem
from gradbox_engine import errors as engine_errors
from gradbox_engine.per_sample import SelfCheckFailed
from gradbox_worker.errors import DeviceNotStarted, ModelsFileError, WeightsDoNotFit
from gradbox_worker.hints import with_hint

log = logging.getLogger(__name__)

T = TypeVar("T")

# How CUDA's allocator and the CPU's say what they could not allocate.
WANTED: Final = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB|TiB)")
UNITS: Final = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

ENGINE_ERRORS: Final[tuple[tuple[type[engine_errors.EngineError], type[GradboxError]], ...]] = (
    (engine_errors.ReplayMismatch, errors.ReplayMismatch),
    (engine_errors.LossNotScalar, errors.LossNotScalar),
    (engine_errors.LossNotFinite, errors.LossNotFinite),
    (engine_errors.GradientNotFinite, errors.GradientNotFinite),
    (engine_errors.NotPositiveDefinite, errors.NotPositiveDefinite),
    (engine_errors.ModelCallFailed, errors.ModelCallFailed),
    (SelfCheckFailed, errors.JobFailed),
    (engine_errors.EngineError, errors.InvalidInputs),
)


@dataclass(frozen=True)
class Caught:
    """What became of an error.

    `spoilt`: the device's state is, so its process should end. Then `error` is kept, for the frames
    of its traceback hold tensors, and to free one there may abort the process.
    """

    problem: Problem
    spoilt: bool
    error: BaseException | None = field(default=None, repr=False, compare=False)


def caught(
    call: Callable[[], T],
    *,
    doing: str,
    let_through: type[BaseException] | tuple[type[BaseException], ...] = (),
    explain: Callable[[BaseException], GradboxError | None] = lambda error: None,
    devices: Sequence[torch.device] = (),
    log_level: int = logging.ERROR,
) -> T | Caught:
    """Call user code; return its value, or the problem that it ended in.

    Args:
        doing: what it is, for messages: "job 4f2a", "the model 'minilm'".
        let_through: raised on as it is.
        explain: asked first what an error means here; None leaves it to `translated`.
        devices: asked whether they go on working after the error.
        log_level: of the line, with traceback, that the worker's log gets.
    """
    try:
        return call()
    except let_through:
        raise
    except BaseException as error:  # a model's KeyboardInterrupt is no reason to end, either
        log.log(log_level, "%s failed", doing, exc_info=True)
        ours = explain(error) or translated(error, doing=doing)
        spoilt = _spoils_device(error) or any(map(refuses_work, devices))
        return Caught(Problem.of(ours), spoilt=spoilt, error=error if spoilt else None)


def translated(error: BaseException, *, doing: str) -> GradboxError:
    """Return the error of ours that tells the user what this one means."""
    chain = list(_chain(error))
    for link in chain:
        if gradbox_engine.is_out_of_memory(link):
            return errors.OutOfMemory(
                f"{doing} does not fit into the device's memory ({_first_line(link)}); cut the "
                f"inputs into smaller shards, ask for fewer gradients with wrt, or sum a loss over "
                f"pairs or triplets of all samples in parts"
            )
    for link in chain:
        if isinstance(link, GradboxError):
            return link
        if isinstance(link, WeightsDoNotFit):
            return errors.OutOfMemory(str(link))
        if isinstance(link, ModelsFileError):
            return errors.UnknownModel(str(link))
        if isinstance(link, DeviceNotStarted):
            return errors.JobFailed(str(link))
    for raised, ours in ENGINE_ERRORS:
        if isinstance(error, raised):
            return ours(with_hint(error))
    return errors.JobFailed(
        f"{doing} failed with {type(error).__name__}: {_first_line(error)}; this is not foreseen, "
        f"and the worker's log has the traceback for the box's owner"
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, by the error or one of its causes."""
    return any(gradbox_engine.is_out_of_memory(link) for link in _chain(error))


def refuses_work(device: torch.device) -> bool:
    """Return whether CUDA refuses all further work in this process; waits for the device.

    An assertion that fails in a kernel may come back as another library's plain RuntimeError.
    """
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except torch.AcceleratorError:
        return True
    return False


def wanted_bytes(error: BaseException) -> int:
    """Return the size of the allocation that failed, by the error or one of its causes.

    Returns:
        0 where none says it.
    """
    for link in _chain(error):
        found = WANTED.search(str(link))
        if found is not None:
            return int(float(found[1]) * UNITS[found[2]])
    return 0


def _spoils_device(error: BaseException) -> bool:
    """Return whether CUDA refuses all further work in this process, as after a failed assertion."""
    return any(
        isinstance(link, torch.AcceleratorError) and not gradbox_engine.is_out_of_memory(link)
        for link in _chain(error)
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:500]
