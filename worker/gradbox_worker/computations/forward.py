"""`Forward`: outputs, the buffers that came of them, and graphs for the second half."""

from __future__ import annotations

from typing import Final

from gradbox.protocol import ForwardSpec
from gradbox_engine import KeptPass, SetOutputs, set_outputs
from gradbox_worker.computations.job import Computed, LoadedJob
from gradbox_worker.computations.sections import by_group, section

MOST_NAMES: Final = 10


def compute(job: LoadedJob, spec: ForwardSpec) -> Computed:
    """Return Z of each group."""
    answer = set_outputs(
        job.loaded.module,
        job.groups,
        wrt=spec.wrt,
        retain=spec.retain,
        older=job.kept,
        observer=job.observer,
        checkpoints=job.checkpoints,
        **job.calls,
    )
    return computed(answer, spec, kept=answer.kept)


def computed(answer: SetOutputs, spec: ForwardSpec, *, kept: KeptPass | None = None) -> Computed:
    """Return what stands in the result file, however many devices computed it."""
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
        kept=kept,
    )
