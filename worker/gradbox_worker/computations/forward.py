"""`Forward`: outputs, the buffers that came of them, and graphs for the second half."""

from __future__ import annotations

from typing import Final

from gradbox.protocol import ForwardSpec
from gradbox_engine import SetOutputs
from gradbox_engine.set_loss import split_set_outputs
from gradbox_worker.computations.held_jobs import held_forward
from gradbox_worker.computations.job import Computed, LoadedJob
from gradbox_worker.computations.sections import by_group, section

MOST_NAMES: Final = 10


def compute(job: LoadedJob, spec: ForwardSpec) -> Computed:
    """Return Z of each group."""
    parts = job.parts()
    with held_forward(job, spec) as held:
        answer = split_set_outputs(
            job.leading.devices(held),
            parts,
            job.groups,
            precision=spec.precision,
            device=held.device,
        )
    return _computed(answer, spec)


def _computed(answer: SetOutputs, spec: ForwardSpec) -> Computed:
    sections = {"outputs": by_group(answer.outputs), "buffers": answer.buffers}
    return Computed(
        tensors={
            name: tensor
            for returned in spec.returns
            for name, tensor in section(returned, sections[returned]).items()
        },
        facts={
            "rows": answer.rows,
            "stateful": answer.stateful,
            "changed_attributes": list(answer.changed_attributes[:MOST_NAMES]),
            "shards_retained": answer.retained,
        },
        seconds=answer.seconds,
        runs=answer.ranges,
    )
