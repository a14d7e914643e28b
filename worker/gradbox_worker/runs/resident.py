"""The states of runs in a device process: which are in memory, and when they are written.

    in the device's memory      the run that is trained, and others within the budget
    in the host's memory        the least recently used of a GPU beyond it, within as much again
    on disk                     beyond that, and what has not been used for a day

A state in memory is that of a recorded step: it is used again only if the job that made it is the
one which the run's record, or the step that was kept, names. So a step whose end was not recorded,
or which another device has made since, needs nothing undone.

Files are written between jobs: of a run that has made 20 steps or for 30 s, and only once there
have been 33 times the seconds that the last writing took, so for 3 % of the time at most. What
stands in the way of a file, such as a full disk, costs the file and not the run.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gradbox.errors import (
    GradboxError,
    InvalidInputs,
    JobFailed,
    RunNotFound,
    StorageFull,
)
from gradbox.protocol import LoRASpec, OptimizerSpec, RunSpec
from gradbox_engine.errors import EngineError
from gradbox_engine.model.wrt import select
from gradbox_engine.optimize import OptimizerChoice, ParameterGroup, TrainingState
from gradbox_worker.exceptions_to_problems import is_out_of_memory
from gradbox_worker.models.registry import Loaded
from gradbox_worker.runs.adapters import adapted, adapter_parameters
from gradbox_worker.runs.run_book import KeptStep, KnownRun, RunBook
from gradbox_worker.runs.state_file import SavedState, StateFiles

log = logging.getLogger(__name__)

WRITE_STEPS: Final = 20
WRITE_S: Final = 30.0
SHARE: Final = 0.03
IDLE_S: Final = 24 * 3600.0
HOST: Final = torch.device("cpu")


@dataclass
class Resident:
    """A state in memory.

    Attributes:
        job: that made its last step; "" before the first.
        doubtful: whether an update has begun and nothing says yet that its step is made.
        spread: whether its model lies on several GPUs, and so does it.
    """

    run: KnownRun
    state: TrainingState
    device: torch.device
    spread: bool
    written_s: float
    used_s: float
    job: str = ""
    doubtful: bool = False
    written_step: int = 0

    @property
    def made(self) -> tuple[int, str]:
        """Its last step, and the job that made it."""
        return self.state.num_steps, self.job

    @property
    def unwritten(self) -> int:
        """How many steps no file has."""
        return self.state.num_steps - self.written_step


@dataclass(frozen=True)
class HeldRun:
    """A run's state as a job uses it, with the model that its steps go through.

    Attributes:
        module: the registered model, or the run's own structure on its tensors. Nothing keeps it
            between jobs, so that the registry can drop the model.
        wrt: what is trained of it.
        files: where the state can be saved.
    """

    resident: Resident
    module: nn.Module
    wrt: Sequence[str] | None
    files: StateFiles

    @property
    def run(self) -> KnownRun:
        """What is known of the run."""
        return self.resident.run

    @property
    def state(self) -> TrainingState:
        """Its state."""
        return self.resident.state

    def save(self, name: str) -> int:
        """Keep the state on disk under a name; return its bytes.

        Raises:
            StorageFull: the disk does not hold it.
        """
        return self.files.save(self.run, self.state, name)

    def numbers(self, *, widened: bool) -> dict[str, Tensor]:
        """Return the state's weights and buffers as they are laid over the model's.

        Those of a loss are not among them.

        Args:
            widened: whether a job computes in float64: buffers that one left stay so.
        """
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        buffers = dict(self.module.named_buffers(remove_duplicate=False))
        found = {n: w for n, w in self.state.weights.items() if n in parameters}
        for name, buffer in self.state.buffers.items():
            if name in buffers:
                found[name] = buffer if widened else buffer.to(buffers[name].dtype)
        return found


Again = Callable[[HeldRun, KeptStep], None]
"""Makes a step once more on the state before it."""


class RunStates:
    """The states that one device process holds, the least recently used first."""

    def __init__(
        self,
        files: StateFiles,
        book: RunBook,
        *,
        device: torch.device,
        budget_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Hold no state yet.

        Args:
            budget_bytes: what states may take of the device's memory, and parked ones of a GPU of
                the host's; None is no limit. That of the run in use stays whatever it takes.
            clock: returns seconds.
        """
        self._files, self._book = files, book
        self._device, self._budget_bytes = device, budget_bytes
        self._clock = clock
        self._residents: OrderedDict[str, Resident] = OrderedDict()  # the last one was used last
        self._next_write_s = clock()
        # Gone with the model itself, when the registry drops it.
        self._structures: WeakKeyDictionary[nn.Module, dict[str, nn.Module]] = WeakKeyDictionary()

    @property
    def names(self) -> list[str]:
        """The ids of the runs whose states are in memory."""
        return list(self._residents)

    def num_bytes(self, device: torch.device | None = None) -> int:
        """Return what the states take in the memory of this device, or of another one."""
        place = self._device if device is None else device
        return sum(one.state.num_bytes for one in self._residents.values() if one.device == place)

    def at(self, run_id: str, step: int | None, loaded: Loaded, again: Again) -> HeldRun:
        """Return a run's state after a step, on the device.

        Args:
            step: None is the newest.
            loaded: the model that the run trains.
            again: makes the steps that neither memory nor a file has.

        Raises:
            RunNotFound: there is no such run, or that state is not kept.
            InvalidInputs: it trains another model.
            JobFailed: a step could not be made again.
        """
        run = self._book.run(run_id)
        if run is None:
            raise RunNotFound(
                f"expected a run of this box, got {run_id!r}, which is not there any more"
            )
        _refuse_other_model(run.spec, run.model_version, loaded)
        step = run.num_steps if step is None else step
        found = self._residents.get(run_id)
        newest = (run.num_steps, run.last_job)
        if found is None or found.doubtful or found.made != newest or step != run.num_steps:
            found = self._recovered(run, step, loaded, again)
        found.run, found.used_s = run, self._clock()
        if found.device != self._device:
            found.state.move(self._device)
            found.device = self._device
        if self._residents.get(run_id) is found:
            self._residents.move_to_end(run_id)
            self._keep_within_budget()
        return self._held(found, loaded)

    def saved(self, run_id: str, name: str, loaded: Loaded) -> HeldRun:
        """Return a state that was saved under a name; it does not stay in memory.

        Raises:
            RunNotFound: it is not there, or damaged.
            InvalidInputs: it is of another model.
        """
        saved = self._files.saved(run_id, name)
        if saved is None:
            raise RunNotFound(
                f"expected a state saved as {name!r}, but it is not there any more, or damaged on "
                f"the box's disk"
            )
        _refuse_other_model(saved.spec, saved.model_version, loaded)
        run = KnownRun(run_id, saved.spec, saved.model_version, saved.facts["step"], "")
        found = self._begun(run, loaded)
        found.state.restore(saved.tensors, saved.facts)
        return self._held(found, loaded)

    def forget(self, run_id: str) -> None:
        """Drop a state from memory, without writing it."""
        self._residents.pop(run_id, None)

    def free(self, *, but: str | None) -> bool:
        """Take the states of other runs off the device, for a job that ran out of memory.

        Returns:
            Whether there were any.
        """
        here = (name for name, one in self._residents.items() if one.device == self._device)
        others = [name for name in here if name != but]
        for name in others:
            self._park(name)
        return bool(others)

    def rest(self) -> None:
        """Write what is due, and drop what was not used for a day; called between jobs."""
        now = self._clock()
        for name, one in list(self._residents.items()):
            if now - one.used_s >= IDLE_S:
                self._drop(name)
            elif self._due_in_s(one) <= 0:
                self._write(name)
        self._keep_within_budget()
        for structures in self._structures.values():
            for name in structures.keys() - self._residents.keys():
                del structures[name]

    def rest_left_s(self) -> float | None:
        """Return in how many seconds `rest` has something to do; None if nothing is in memory."""
        now = self._clock()
        waits = [one.used_s + IDLE_S - now for one in self._residents.values()]
        waits += [self._due_in_s(one) for one in self._residents.values()]
        return max(0.0, min(waits)) if waits else None

    def close(self) -> None:
        """Write all states that no file has, and hold none any more."""
        for name in list(self._residents):
            self._drop(name)

    def _held(self, resident: Resident, loaded: Loaded) -> HeldRun:
        spec = resident.run.spec
        module = self._module(resident.run, loaded)
        wrt = spec.wrt if spec.adapter is None else adapter_parameters(module)
        return HeldRun(resident, module, wrt, self._files)

    def _module(self, run: KnownRun, loaded: Loaded) -> nn.Module:
        if run.spec.adapter is None:
            return loaded.module
        structures = self._structures.setdefault(loaded.module, {})
        if run.id not in structures:
            structures[run.id] = adapted(loaded.module, run.spec.adapter, seed=run.spec.seed)
        return structures[run.id]

    def _begun(self, run: KnownRun, loaded: Loaded) -> Resident:
        """Return a run's state at step 0, with its model's own numbers."""
        module = self._module(run, loaded)
        wrt = run.spec.wrt if run.spec.adapter is None else adapter_parameters(module)
        parameters = select(module, wrt).parameters
        if not parameters:
            raise InvalidInputs("wrt: expected a run to train a parameter, got none")
        now = self._clock()
        return Resident(
            run=run,
            state=TrainingState(parameters, _choice(run.spec.optimizer)),
            device=self._device,
            spread=len(loaded.devices) > 1,
            written_s=now,
            used_s=now,
        )

    def _recovered(self, run: KnownRun, step: int, loaded: Loaded, again: Again) -> Resident:
        """Return a state that is not in memory, from one that is, or from a file.

        It stays in memory if it is the newest, or the run has no other there.
        """
        kept = self._book.kept_steps(run.id)
        since = {one.number: one for one in kept if one.number <= step}
        recorded = {(one.number, one.job) for one in kept} | {(run.num_steps, run.last_job)}
        found = self._residents.get(run.id)
        if found is not None and (found.doubtful or found.made not in recorded):
            self.forget(run.id)
            found = None
        if found is None or not _leads(found.state.num_steps, step, since):
            found = self._from_file(run, step, since, loaded)
            if step == run.num_steps or run.id not in self._residents:
                self._residents[run.id] = found
        for number in range(found.state.num_steps + 1, step + 1):
            self._make_again(self._held(found, loaded), since[number], again)
        return found

    def _make_again(self, held: HeldRun, kept: KeptStep, again: Again) -> None:
        try:
            again(held, kept)
        except (GradboxError, EngineError) as error:
            if is_out_of_memory(error):
                raise
            raise JobFailed(
                f"step {kept.number} of run {held.run.id} was made before and has to be made "
                f"again, which fails, so the states from it on are lost: {error}"
            ) from error

    def _from_file(
        self, run: KnownRun, step: int, since: Mapping[int, KeptStep], loaded: Loaded
    ) -> Resident:
        """Return the newest state on disk, or the first of all, from which steps lead to `step`.

        Raises:
            RunNotFound: there is none.
        """
        written = self._files.steps(run.id)
        for number in written:
            if _leads(number, step, since):
                saved = self._files.read(run.id, number)
                if saved is not None:
                    found = self._begun(run, loaded)
                    found.state.restore(saved.tensors, saved.facts)
                    found.job = run.last_job if number == run.num_steps else _job(since, number)
                    found.written_step = number
                    return found
        found = self._first(run, loaded)
        if not _leads(found.state.num_steps, step, since):
            raise RunNotFound(
                f"expected a step of run {run.id} whose state is kept, got {step}; the run is at "
                f"step {run.num_steps}, with files of {written or 'none'} and the steps since the "
                f"older one; save a state while it is the newest (run.save), to use it later"
            )
        return found

    def _first(self, run: KnownRun, loaded: Loaded) -> Resident:
        """Return a run's state before its first step.

        Raises:
            InvalidInputs: what it goes on from is not there, or of another kind.
        """
        found = self._begun(run, loaded)
        if run.spec.start is not None:
            saved = self._files.start(run.id)
            if saved is None:
                raise InvalidInputs(
                    "start: expected the state that the run goes on from, but it is not there any "
                    "more, or damaged on the box's disk; make a run from another state"
                )
            begin(run, found.state, saved)
            found.written_step = found.state.num_steps
        return found

    def _keep_within_budget(self) -> None:
        """Park the least recently used states beyond the budget, and drop parked ones."""
        if self._budget_bytes is None:
            return
        for place in dict.fromkeys((self._device, HOST)):
            for name in list(self._residents)[:-1]:
                if self.num_bytes(place) <= self._budget_bytes:
                    break
                if self._residents[name].device == place:
                    self._park(name)

    def _park(self, name: str) -> None:
        """Take a state one place further from the device."""
        one = self._residents[name]
        if one.device == HOST or one.spread:
            self._drop(name)
            return
        one.state.move(HOST)
        one.device = HOST

    def _drop(self, name: str) -> None:
        if self._residents[name].unwritten:
            self._write(name)
        self.forget(name)

    def _due_in_s(self, one: Resident) -> float:
        if one.unwritten <= 0:
            return math.inf
        due_s = 0.0 if one.unwritten >= WRITE_STEPS else one.written_s + WRITE_S
        return max(due_s, self._next_write_s) - self._clock()

    def _write(self, name: str) -> None:
        """Write a state, if it is still the one that the run's record names."""
        one, run = self._residents[name], self._book.run(name)
        if run is None or one.doubtful or one.made != (run.num_steps, run.last_job):
            self.forget(name)
            return
        began, pause_s = self._clock(), 0.0
        try:
            self._files.write(run, one.state)
            self._note_written(one)
        except (StorageFull, InvalidInputs, OSError) as error:
            log.warning("no file of the state of run %s: %s", name, error)
            pause_s = WRITE_S
        ended = self._clock()
        self._next_write_s = ended + max(pause_s, (ended - began) * (1 / SHARE - 1))

    def _note_written(self, one: Resident) -> None:
        run_id, one.written_step, one.written_s = one.run.id, one.state.num_steps, self._clock()
        self._book.states_written(
            run_id, steps=self._files.steps(run_id), size_bytes=self._files.size_bytes(run_id)
        )


def begin(run: KnownRun, state: TrainingState, saved: SavedState) -> None:
    """Give a run the state that it starts from: all of it, or its weights alone.

    Weights that the run does not train are laid over the model's all the same.

    Raises:
        InvalidInputs: the state is of another model, adapter or optimizer, or lacks a parameter.
    """
    spec, with_moments = run.spec, run.spec.start_moments
    weights_alone = "take its weights alone (start_weights=), or make the run as that one was made"
    if saved.model_version != run.model_version or saved.spec.adapter != spec.adapter:
        raise InvalidInputs(
            f"start: expected a state of {_of(run.model_version, spec.adapter)}, got one of "
            f"{_of(saved.model_version, saved.spec.adapter)}; start from another state"
        )
    if with_moments and saved.spec.optimizer.name != spec.optimizer.name:
        raise InvalidInputs(
            f"start: expected a state with the moments of {spec.optimizer.name!r}, got one of "
            f"{saved.spec.optimizer.name!r}; {weights_alone}"
        )
    own = state.tensors()
    lacking = sorted(own.keys() - saved.tensors.keys())
    if with_moments and lacking:
        raise InvalidInputs(
            f"start: expected a state of all that the run trains, got one without "
            f"{', '.join(lacking[:3])}{' …' if len(lacking) > 3 else ''}; {weights_alone}"
        )
    state.restore({**own, **saved.tensors}, saved.facts, with_moments=with_moments)


def _of(version: str, adapter: LoRASpec | None) -> str:
    return f"model {version[:12]} with {adapter!r}" if adapter else f"model {version[:12]}"


def _refuse_other_model(spec: RunSpec, version: str, loaded: Loaded) -> None:
    if version != loaded.version:
        raise InvalidInputs(
            f"expected the state of a run of {loaded.name}@{loaded.version[:12]}, which the job "
            f"names, got one of {spec.model} at version {version[:12]}"
        )


def _leads(first: int, step: int, since: Mapping[int, KeptStep]) -> bool:
    """Return whether all steps from one state to a later one, or the same, are kept."""
    return first <= step and all(number in since for number in range(first + 1, step + 1))


def _job(since: Mapping[int, KeptStep], number: int) -> str:
    return since[number].job if number in since else ""


def _choice(spec: OptimizerSpec) -> OptimizerChoice:
    groups = [ParameterGroup(group.wrt, group.options) for group in spec.groups]
    return OptimizerChoice(spec.name, spec.options, groups)
