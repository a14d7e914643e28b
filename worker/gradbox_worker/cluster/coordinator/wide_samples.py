"""What a coordinator computes of a per-sample job: it joins or adds what the ranges give.

Dense rows are in the result file by then. See `gradbox_engine.ranges.samples`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradbox.protocol import JacobianSpec, PerSampleGradientSpec, RangeView, TensorRef
from gradbox_engine.per_sample.request import GradientReduction, JacobianReduction
from gradbox_engine.ranges.protocol import HOST
from gradbox_engine.ranges.samples import SplitSamples, split_samples
from gradbox_worker.cluster.actor.open_samples import request_of
from gradbox_worker.cluster.coordinator.ray_sample_devices import RaySampleDevices
from gradbox_worker.cluster.coordinator.wide_computations import Answer, WideSetting, tensors_of
from gradbox_worker.computations.factors import stored_rows
from gradbox_worker.computations.per_sample import (
    computed_gradient,
    computed_jacobian,
    loss_inputs,
    other_loss_inputs,
    sample_groups,
    vectors,
)


@dataclass(frozen=True)
class OfSamples:
    """A `PerSampleGradient` or a `Jacobian`."""

    spec: PerSampleGradientSpec | JacobianSpec

    @property
    def loss_parameters(self) -> tuple[str, ...]:
        """None."""
        return ()

    @property
    def sent(self) -> Sequence[TensorRef]:
        """What the loss's graph has of tensors; its inputs go with each range."""
        spec = self.spec
        return tensors_of([spec.loss.function]) if isinstance(spec, PerSampleGradientSpec) else []

    def run(self, setting: WideSetting) -> Answer:
        """See `WideComputation`."""
        answer = self._split(setting)
        views = [
            RangeView(
                start=run.start,
                stop=run.stop,
                device=device,
                samples_s=run.seconds,
                devices_lost=run.devices_lost,
            )
            for run, device in zip(answer.ranges, setting.devices.ran, strict=False)
        ]
        if isinstance(self.spec, PerSampleGradientSpec):
            return computed_gradient(answer, self.spec), views
        return computed_jacobian(
            answer, self.spec, *sample_groups(setting.groups, self.spec)
        ), views

    def _split(self, setting: WideSetting) -> SplitSamples:
        spec, tensors = self.spec, setting.tensors
        rows, others = sample_groups(setting.groups, spec)
        places = {group.name: place for place, group in enumerate(setting.groups)}
        of_others = None if others is None else places[others.name]
        against = None
        if spec.against is not None:
            against = stored_rows(setting.work.earlier_result, of=spec.against, device=HOST)
        request = request_of(spec, vectors=vectors(spec, tensors), against=against)
        request.check(
            GradientReduction if isinstance(spec, PerSampleGradientSpec) else JacobianReduction
        )
        return split_samples(
            RaySampleDevices(
                setting.devices,
                groups=(places[rows.name], of_others),
                result=setting.result,
                rounding=setting.rounding,
            ),
            setting.cut([places[rows.name]], by_samples=_forms_rows(spec)),
            request,
            loss_inputs=loss_inputs(spec, tensors),
            other_parts=() if of_others is None else setting.cut([of_others]),
            other_loss_inputs=other_loss_inputs(spec, tensors),
            observer=setting.observer,
        )


def _forms_rows(spec: PerSampleGradientSpec | JacobianSpec) -> bool:
    """Return whether the devices make each sample's row, which does not depend on its length."""
    return spec.reduce == "projection" or (spec.reduce == "none" and spec.form == "dense")
