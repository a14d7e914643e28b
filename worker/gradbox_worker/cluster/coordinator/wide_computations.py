"""What a coordinator computes of a wide job in two phases, by its kind; the devices do the rest.

    Gradient                 gathers Z, evaluates the loss, and sends dL/dZ to the ranges
    Gradient at cotangents   sends what it was given
    MixedGradient            gathers dfdz, evaluates `outer`, and sends its derivative
    Forward                  gathers Z

`wide_samples` has the kinds without phases. See `gradbox_engine.ranges`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from gradbox.protocol import (
    CotangentsLoss,
    ForwardSpec,
    GradientSpec,
    MixedGradientSpec,
    RangeView,
    TensorRef,
    TracedFunction,
)
from gradbox_engine import Group, Observer
from gradbox_engine.mixed import split_mixed_gradient
from gradbox_engine.ranges import Range, cut
from gradbox_engine.ranges.protocol import HOST
from gradbox_engine.requests import RangeRun
from gradbox_engine.set_loss import (
    split_gradient_at_cotangents,
    split_set_gradient,
    split_set_outputs,
)
from gradbox_worker.cluster.coordinator.open_devices import OpenDevices
from gradbox_worker.cluster.coordinator.ray_devices import RayDevices
from gradbox_worker.computations import cotangents, forward, gradient, mixed_gradient
from gradbox_worker.computations.engine_inputs import (
    Loss,
    gradient_loss,
    mixed_objectives,
    model_penalties,
)
from gradbox_worker.computations.job import Computed, call_options
from gradbox_worker.computations.sections import GRADS
from gradbox_worker.files.blob_tensors import BlobTensors, TensorForm
from gradbox_worker.files.result_in_place import ResultOnDisk
from gradbox_worker.files.rounded_gradients import RoundedGradients
from gradbox_worker.work import Work

Answer = tuple[Computed, list[RangeView]]


@dataclass(frozen=True, kw_only=True)
class WideSetting:
    """What a coordinator has of a job while its devices compute.

    Attributes:
        num_ranges: how many at most.
        parts: the ranges that it must have, where there are some.
        forms: by group, what is known of every shard: its arguments' dtypes and shapes.
    """

    work: Work
    devices: OpenDevices
    num_ranges: int
    parts: tuple[Range, ...]
    groups: Sequence[Group]
    forms: Sequence[Sequence[Mapping[str, TensorForm]]]
    tensors: BlobTensors
    result: ResultOnDisk
    rounding: RoundedGradients
    observer: Observer

    def cut(self, groups: Sequence[int], *, by_samples: bool = False) -> tuple[Range, ...]:
        """Return ranges of the shards of some groups, by their bytes.

        Args:
            by_samples: by their samples as much as by their bytes.
        """
        forms = [form for group in groups for form in self.forms[group]]
        costs = _shares([sum(tensor.num_bytes for tensor in form.values()) for form in forms])
        if by_samples:
            samples = [
                max((f.shape[0] for f in form.values() if f.shape), default=1) for form in forms
            ]
            costs = [a + b for a, b in zip(costs, _shares(samples), strict=True)]
        return cut(costs, self.num_ranges)


def _shares(sizes: Sequence[int]) -> list[float]:
    return [size / max(1, sum(sizes)) for size in sizes]


class WideComputation(Protocol):
    """A computation that is ready for its devices."""

    @property
    def loss_parameters(self) -> tuple[str, ...]:
        """Names of what the loss itself has to differentiate."""

    @property
    def sent(self) -> Sequence[TensorRef]:
        """What devices need of the job's tensors, beside inputs, weights and readout."""

    def run(self, setting: WideSetting) -> Answer:
        """Compute it in ranges.

        Raises:
            CoupledShards: the shards cannot be split.
            DeviceLost: a range ended one device after the other.
            EngineError: see `gradbox_engine.ranges`.
        """


@dataclass(frozen=True)
class InPhases:
    """A computation of a first pass and a replay, or of a first pass alone."""

    compute: Callable[
        [WideSetting, RayDevices, Sequence[Range]], tuple[Computed, Sequence[RangeRun]]
    ]
    sent: Sequence[TensorRef] = ()
    loss_parameters: tuple[str, ...] = ()

    def run(self, setting: WideSetting) -> Answer:
        """See `WideComputation`."""
        parts = setting.parts or setting.cut(range(len(setting.groups)))
        spec = setting.work.spec
        wanted = isinstance(spec, MixedGradientSpec) or GRADS in getattr(spec, "returns", ())
        devices = RayDevices(
            setting.devices,
            setting.groups,
            result=setting.result if wanted else None,
            rounding=setting.rounding,
            observer=setting.observer,
        )
        computed, runs = self.compute(setting, devices, parts)
        views = [
            RangeView(
                start=run.start,
                stop=run.stop,
                device=device,
                forward_s=run.forward_s,
                replay_s=run.replay_s,
                shards_retained=run.retained,
                devices_lost=run.devices_lost,
                rerun_difference=run.rerun_difference,
            )
            for run, device in zip(runs, setting.devices.ran, strict=True)
        ]
        return computed, views


def in_phases(work: Work, tensors: BlobTensors) -> InPhases:
    """Return what a job computes, with what its loss reads.

    Raises:
        GradboxError: as for the job on one device.
    """
    spec = work.spec
    if isinstance(spec, ForwardSpec):
        return InPhases(partial(_forward, spec))
    if isinstance(spec, MixedGradientSpec):
        trained = [ref for ref in spec.outer.tensors.values() if ref.requires_grad]
        sent = [*spec.y.values(), *spec.inner.tensors.values(), *trained]
        return InPhases(partial(_mixed, spec), sent=sent)
    assert isinstance(spec, GradientSpec)
    functions = [penalty.loss for penalty in spec.penalties]
    scales = [penalty.per_sample_scale for penalty in spec.penalties]
    sent = tensors_of([*functions, *scales])
    if isinstance(spec.loss, CotangentsLoss):
        return InPhases(partial(_at_cotangents, spec, spec.loss), sent=sent)
    loss = gradient_loss(spec, tensors, device=HOST)
    names = tuple(loss.objective.parameters)
    return InPhases(partial(_gradient, spec, loss), sent=sent, loss_parameters=names)


def tensors_of(functions: Sequence[TracedFunction | None]) -> list[TensorRef]:
    """Return the tensors that functions read."""
    return [ref for function in functions if function for ref in function.tensors.values()]


def _gradient(
    spec: GradientSpec,
    loss: Loss,
    setting: WideSetting,
    devices: RayDevices,
    parts: Sequence[Range],
) -> tuple[Computed, Sequence[RangeRun]]:
    answer = split_set_gradient(
        devices,
        parts,
        setting.groups,
        loss.objective,
        returns=tuple(spec.returns),
        observer=setting.observer,
        penalties=model_penalties(spec, setting.tensors, device=HOST),
        **call_options(spec),
    )
    return gradient.computed(answer, spec, loss), answer.ranges


def _at_cotangents(
    spec: GradientSpec,
    loss: CotangentsLoss,
    setting: WideSetting,
    devices: RayDevices,
    parts: Sequence[Range],
) -> tuple[Computed, Sequence[RangeRun]]:
    answer = split_gradient_at_cotangents(
        devices,
        parts,
        setting.groups,
        cotangents.given_cotangents(loss, setting.tensors),
        cotangents.first_outputs(setting.work.earlier_result, loss.forward, HOST),
        precision=spec.precision,
    )
    return cotangents.computed(answer, spec), answer.ranges


def _mixed(
    spec: MixedGradientSpec,
    setting: WideSetting,
    devices: RayDevices,
    parts: Sequence[Range],
) -> tuple[Computed, Sequence[RangeRun]]:
    (group,) = setting.groups
    _, outer = mixed_objectives(spec, setting.tensors, device=HOST)
    answer = split_mixed_gradient(
        devices,
        parts,
        group,
        outer,
        returns=tuple(spec.returns),
        observer=setting.observer,
        **call_options(spec),
    )
    return mixed_gradient.computed(answer), answer.ranges


def _forward(
    spec: ForwardSpec,
    setting: WideSetting,
    devices: RayDevices,
    parts: Sequence[Range],
) -> tuple[Computed, Sequence[RangeRun]]:
    answer = split_set_outputs(devices, parts, setting.groups, precision=spec.precision)
    return forward.computed(answer, spec), answer.ranges
