"""A device that trains: jobs run as a device process runs them, and a dict keeps the runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradbox.protocol import (
    ForwardSpec,
    InputGroup,
    JobSpec,
    OptimizerSpec,
    Receipt,
    RunSpec,
    ShardRef,
    StateRef,
    StateSpec,
    StepSpec,
    step_seed,
)
from gradbox_worker.computations.checkpoints import Pace
from gradbox_worker.computations.execution import Execution
from gradbox_worker.computations.kept_graphs import KeptGraphs
from gradbox_worker.exceptions_to_problems import Caught
from gradbox_worker.models import read_models_file
from gradbox_worker.models.registry import Registry
from gradbox_worker.runs import KeptStep, KnownRun, RunStates, StateFiles
from gradbox_worker.work import Finished, Stopped, Work
from tests.boxes import tensors_in
from tests.valkey import empty_backing
from tests.worker.box import Box, receipt_at, sum_of_squares, traced

DOUBLE = "double"  # the model that most tests train
ZOO = Path(__file__).with_name("zoo.py")


class Silent:
    def step(self, phase: str, done: int, total: int) -> None: ...


@dataclass
class Book:
    """Runs as the service keeps them, in a dict."""

    runs: dict[str, KnownRun] = field(default_factory=dict)
    kept: dict[str, list[KeptStep]] = field(default_factory=dict)
    written: list[tuple[str, list[int]]] = field(default_factory=list)

    def run(self, run_id: str) -> KnownRun | None:
        return self.runs.get(run_id)

    def kept_steps(self, run_id: str) -> Sequence[KeptStep]:
        return self.kept[run_id]

    def states_written(self, run_id: str, *, steps: Sequence[int], size_bytes: int) -> None:
        assert size_bytes > 0
        self.written.append((run_id, list(steps)))
        if len(steps) > 1:
            self.kept[run_id] = [one for one in self.kept[run_id] if one.number > steps[-1]]

    def finish(self, spec: StepSpec, work: Work) -> None:
        """Record a step as made."""
        run = self.runs[spec.run]
        assert spec.number == run.num_steps + 1
        self.runs[spec.run] = replace(run, num_steps=spec.number, last_job=work.job_id)
        kept = KeptStep(spec.number, spec, work.job_id, earlier_result=work.earlier_result)
        self.kept[spec.run].append(kept)


class Clock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Device:
    """Runs jobs, one after the other, on the CPU."""

    def __init__(
        self,
        folder: Path,
        *,
        book: Book | None = None,
        box: Box | None = None,
        budget_bytes: int | None = None,
        models: str = "",
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.box = box or Box(folder, empty_backing(folder))
        self.box.models_file.write_text(
            "".join(
                f'[models.{name}]\nbuilder = "python"\nsource = "{ZOO}:{name}"\n'
                for name in (DOUBLE, "matrices", "half", "attention", "failing", "growing")
            )
            + models
        )
        self.registry = Registry(read_models_file(self.box.models_file), device=torch.device("cpu"))
        self.book = book or Book()
        self.clock = Clock()
        self.folder = folder
        self.kept = KeptGraphs()
        self._budget_bytes = budget_bytes
        self.num_jobs = 0
        self.restart()

    def restart(self) -> None:
        """Lose all that is in memory."""
        self.states = RunStates(
            StateFiles(self.folder / "runs", disk_reserve_bytes=0),
            self.book,
            device=torch.device("cpu"),
            budget_bytes=self._budget_bytes,
            clock=self.clock,
        )

    def begin(
        self, model: str = DOUBLE, *, optimizer: OptimizerSpec | None = None, **given: Any
    ) -> str:
        """Make a run; return its id."""
        spec = RunSpec(
            model=model,
            optimizer=optimizer or OptimizerSpec(name="adam", options={"lr": 0.01}),
            **given,
        )
        run_id = f"run{len(self.book.runs)}"
        version = self.registry.get(model).version
        start = 0 if spec.start is None or not spec.start_moments else spec.start.step or 0
        self.book.runs[run_id] = KnownRun(run_id, spec, version, start, "")
        self.book.kept[run_id] = []
        return run_id

    def spec(
        self,
        run_id: str,
        shards: Sequence[Mapping[str, Tensor]],
        *,
        loss: Callable[..., Tensor] | Any = sum_of_squares,
        **given: Any,
    ) -> StepSpec:
        """Return the run's next step, filled in as the service does."""
        run = self.book.run(run_id)
        assert run is not None
        number = given.pop("number", run.num_steps + 1)
        refs = [ShardRef(blob=self.box.upload(shard)) for shard in shards]
        return StepSpec(
            **{
                "computation": "step",
                "run": run_id,
                "number": number,
                "model": run.spec.model,
                "wrt": run.spec.wrt,
                "mode": run.spec.mode,
                "precision": run.spec.precision,
                "seed": step_seed(run.spec.seed, number),
                "inputs": [InputGroup(shards=refs)],
                "loss": traced(loss) if callable(loss) else loss,
                **given,
            }
        )

    def forward(self, run_id: str, *, step: int | None = None, **given: Any) -> ForwardSpec:
        """Return a job on the run's weights that returns outputs."""
        refs = [ShardRef(blob=self.box.upload(shard)) for shard in shards_at(0)]
        return ForwardSpec(
            **{
                "computation": "forward",
                "model": self.book.runs[run_id].spec.model,
                "inputs": [InputGroup(shards=refs)],
                "state": StateRef(run=run_id, step=step),
                **given,
            }
        )

    def work(self, spec: JobSpec, *, earlier: Path | None = None) -> Work:
        """Return a job for the device."""
        self.num_jobs += 1
        job_id = f"{self.num_jobs:012x}"
        return Work(
            job_id=job_id,
            attempt=1,
            model=spec.model,
            model_version=self.registry.get(spec.model).version,
            spec=spec,
            spec_digest="d",
            result_path=self.folder / "results" / f"{job_id}.safetensors",
            queued_s=0.0,
            earlier_result=earlier,
            disk_reserve_bytes=0,
        )

    def run(
        self,
        spec: JobSpec,
        *,
        observer: Any = None,
        earlier: Path | None = None,
        recorded: bool = True,
        again: Work | None = None,
        pace: Pace | None = None,
    ) -> tuple[Work, Finished | Stopped | Caught]:
        """Run a job, or `again` one that was stopped; record it if it was a step that was made."""
        work = again or self.work(spec, earlier=earlier)
        answer = Execution(
            work=work,
            registry=self.registry,
            blobs=self.box.backing.blobs,
            kept=self.kept,
            observer=observer or Silent(),
            runs=self.states,
            pace=pace,
        ).attempt()
        if recorded and isinstance(answer, Finished) and isinstance(spec, StepSpec):
            self.book.finish(spec, work)
        return work, answer

    def step(
        self, run_id: str, shards: Sequence[Mapping[str, Tensor]], **given: Any
    ) -> tuple[Receipt, dict[str, Tensor]]:
        """Make the next step; return its receipt and its tensors."""
        earlier = given.pop("earlier", None)
        work, answer = self.run(self.spec(run_id, shards, **given), earlier=earlier)
        assert isinstance(answer, Finished), answer
        return receipt_at(work.result_path), tensors_in(work.result_path)

    def written(
        self, run_id: str, *, save: str | None = None, **ref: Any
    ) -> tuple[Finished, dict[str, Tensor]]:
        """Run the job that writes a state; return its end and its tensors."""
        spec = StateSpec(
            computation="state",
            model=self.book.runs[run_id].spec.model,
            state=StateRef(run=run_id, **ref),
            save=save,
        )
        work, answer = self.run(spec)
        assert isinstance(answer, Finished), answer
        return answer, tensors_in(work.result_path)

    def saved(self, run_id: str, name: str) -> int:
        """Save the newest state under a name; return its bytes."""
        answer, tensors = self.written(run_id, save=name)
        assert not tensors
        assert answer.saved_bytes is not None
        return answer.saved_bytes

    def read_save(self, run_id: str, name: str) -> dict[str, Tensor]:
        """Return the weights and buffers of a state that was saved."""
        model = self.book.runs[run_id].spec.model
        ref = StateRef(run=run_id, save=name)
        work, answer = self.run(StateSpec(computation="state", model=model, state=ref))
        assert isinstance(answer, Finished), answer
        return tensors_in(work.result_path)

    def state(self, run_id: str) -> dict[str, Tensor]:
        """Return copies of all that the newest state has, made again if it is not in memory."""
        model = self.registry.get(self.book.runs[run_id].spec.model)
        run = self.book.runs[run_id]
        if run_id not in self.states.names and run.num_steps:
            _, answer = self.run(self.forward(run_id))
            assert isinstance(answer, Finished), answer
        held = self.states.at(run_id, None, model, never_again)
        return {name: tensor.clone() for name, tensor in held.state.tensors().items()}


def never_again(*_: object) -> None:
    raise AssertionError("expected a state that is in memory or on disk")


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Tell whether two states are equal to the last bit."""
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def shards_at(
    step: int, *, num: int = 3, dtype: torch.dtype = torch.float64
) -> list[dict[str, Tensor]]:
    """Return the inputs of a step."""
    generator = torch.Generator().manual_seed(step)
    return [{"0": torch.randn(4, 5, generator=generator, dtype=dtype)} for _ in range(num)]
