"""The box's runs, as its Redis has them: a `RunBook` of the service's records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gradbox.protocol import CotangentsLoss, StepSpec
from gradbox_service.jobs import Records
from gradbox_service.runs import Runs
from gradbox_service.store import ResultStore
from gradbox_worker.runs.run_book import KeptStep, KnownRun


class RecordedRuns:
    """Implements `RunBook`."""

    def __init__(self, runs: Runs, records: Records, results: ResultStore) -> None:
        """Read nothing yet.

        Args:
            records: of the jobs that made steps, and of the forward jobs behind them.
            results: of the latter.
        """
        self._runs, self._records, self._results = runs, records, results

    def run(self, run_id: str) -> KnownRun | None:
        found = self._runs.get(run_id)
        if found is None:
            return None
        return KnownRun(run_id, found.spec, found.model_version, found.num_steps, found.last_job)

    def kept_steps(self, run_id: str) -> Sequence[KeptStep]:
        run = self._runs.get(run_id)
        kept = [] if run is None else self._runs.kept(run)
        specs = ((step, self._records.spec(step.job)) for step in kept)
        return [
            KeptStep(step.number, spec, step.job, earlier_result=self._forward(spec))
            for step, spec in specs
            if isinstance(spec, StepSpec)
        ]

    def states_written(self, run_id: str, *, steps: Sequence[int], size_bytes: int) -> None:
        self._runs.written(run_id, steps, size_bytes=size_bytes)

    def _forward(self, spec: StepSpec) -> Path | None:
        if not isinstance(spec.loss, CotangentsLoss):
            return None
        forward = self._records.get(spec.loss.forward)
        if forward is None:
            return None
        return self._results.on_disk(forward.id, attempt=forward.attempt)
