"""What a coordinator computes of a wide job, by its kind; the devices do the rest.

    Gradient                 gathers Z, evaluates the loss, and sends dL/dZ to the ranges
    Gradient at cotangents   sends what it was given
    Forward                  gathers Z

See `gradbox_engine.ranges`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from gradbox.errors import WorkerLost
from gradbox.protocol import CotangentsLoss, ForwardSpec, GradientSpec
from gradbox_engine import Group, Observer
from gradbox_engine.errors import DeviceLost
from gradbox_engine.ranges import (
    Devices,
    Range,
    RangeRun,
    split_gradient_at_cotangents,
    split_set_gradient,
    split_set_outputs,
)
from gradbox_engine.ranges.protocol import HOST
from gradbox_worker.computations import cotangents, forward, gradient
from gradbox_worker.computations.engine_inputs import Loss, gradient_loss, model_penalties
from gradbox_worker.computations.job import Computed
from gradbox_worker.files.blob_tensors import BlobTensors
from gradbox_worker.work import Work

Answer = tuple[Computed, Sequence[RangeRun]]
Run = Callable[[Devices, Sequence[Range], Sequence[Group], Observer], Answer]


@dataclass(frozen=True)
class WideComputation:
    """A computation that is ready for its devices.

    Attributes:
        loss_parameters: names of what the loss itself has to differentiate.
    """

    compute: Run
    loss_parameters: tuple[str, ...] = ()

    def run(
        self,
        devices: Devices,
        parts: Sequence[Range],
        groups: Sequence[Group],
        observer: Observer,
    ) -> Answer:
        """Compute it in ranges.

        Raises:
            CoupledShards: the shards cannot be split.
            WorkerLost: a range ended one device after the other.
            EngineError: see `gradbox_engine.ranges`.
        """
        try:
            return self.compute(devices, parts, groups, observer)
        except DeviceLost as error:
            raise WorkerLost(str(error)) from error


def wide_computation(work: Work, tensors: BlobTensors) -> WideComputation:
    """Return what a job computes, with what its loss reads.

    Raises:
        GradboxError: as for the job on one device.
    """
    spec = work.spec
    if isinstance(spec, ForwardSpec):
        return WideComputation(partial(_forward, spec))
    assert isinstance(spec, GradientSpec)
    if isinstance(spec.loss, CotangentsLoss):
        return WideComputation(partial(_at_cotangents, work, spec, spec.loss, tensors))
    loss = gradient_loss(spec, tensors, device=HOST)
    return WideComputation(
        partial(_gradient, spec, loss, tensors),
        loss_parameters=tuple(loss.objective.parameters),
    )


def _gradient(
    spec: GradientSpec,
    loss: Loss,
    tensors: BlobTensors,
    devices: Devices,
    parts: Sequence[Range],
    groups: Sequence[Group],
    observer: Observer,
) -> Answer:
    answer = split_set_gradient(
        devices,
        parts,
        groups,
        loss.objective,
        returns=tuple(spec.returns),
        observer=observer,
        seed=spec.seed,
        mode=spec.mode,
        precision=spec.precision,
        output=spec.output,
        penalties=model_penalties(spec, tensors, device=HOST),
        streams=spec.streams,
    )
    return gradient.computed(answer, spec, loss), answer.ranges


def _at_cotangents(
    work: Work,
    spec: GradientSpec,
    loss: CotangentsLoss,
    tensors: BlobTensors,
    devices: Devices,
    parts: Sequence[Range],
    groups: Sequence[Group],
    observer: Observer,
) -> Answer:
    answer = split_gradient_at_cotangents(
        devices,
        parts,
        groups,
        cotangents.given_cotangents(loss, tensors),
        cotangents.first_outputs(work.earlier_result, loss.forward, HOST),
        precision=spec.precision,
        observer=observer,
    )
    return cotangents.computed(answer, spec), answer.ranges


def _forward(
    spec: ForwardSpec,
    devices: Devices,
    parts: Sequence[Range],
    groups: Sequence[Group],
    observer: Observer,
) -> Answer:
    answer = split_set_outputs(devices, parts, groups, precision=spec.precision, observer=observer)
    return forward.computed(answer, spec), answer.ranges
