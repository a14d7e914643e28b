"""The tangent pass of a mixed gradient: J u of every shard, contracted with a."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from gradbox_engine.checkpoint import Checkpoint
from gradbox_engine.errors import ModelCallFailed
from gradbox_engine.mixed.first_pass import DFDZ
from gradbox_engine.mixed.inner import Contraction, norm
from gradbox_engine.mixed.jacobian_products import Linearised, missing_rule
from gradbox_engine.mixed.prepared import PreparedMixed
from gradbox_engine.model.calling.outputs import Outputs
from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.model.comparison import ReplayComparison, sketch
from gradbox_engine.replay.gradient_sums import GradientSums
from gradbox_engine.replay.shard_record import ShardRecord

_ROUNDINGS = 1e3
"""How far from zero, to ‖a‖‖u‖, a product may be where the Jacobian is zero but for rounding."""

DISAGREES = "forward mode that disagrees with reverse mode"


@dataclass
class TangentProgress:
    """How far the tangent pass has come, and how it went."""

    num_done: int = 0  # shards that were added to the sums
    obstacle: str | None = None  # what is in the way of forward mode, once that is known
    fallbacks: dict[str, int] = field(default_factory=dict)
    difference: float = 0.0

    @property
    def num_retained(self) -> int:
        """None: no graph is kept."""
        return 0

    @property
    def num_replayed(self) -> int:
        """All that are done went through the model once more."""
        return self.num_done

    @property
    def input_grads(self) -> dict[Position, dict[str, Tensor | None]]:
        """None: shards are constants here."""
        return {}

    def state(self) -> Checkpoint:
        """Return all of it, for another process."""
        return Checkpoint({}, asdict(self))

    @classmethod
    def of(cls, state: Checkpoint | None) -> TangentProgress:
        """Go on from a `state` of another process; begin where there is none."""
        return cls() if state is None else cls(**state.facts)


def tangent_pass(
    job: PreparedMixed,
    records: Sequence[ShardRecord],
    directions: Mapping[Position, Tensor],
    sums: GradientSums,
    *,
    progress: TangentProgress,
    largest: Tensor,
    after_shard: Callable[[TangentProgress, ReplayComparison], None] = lambda *_: None,
) -> None:
    """Add ∂⟨a_i(y, v_i), J_i u_i⟩/∂y for every shard that u is not zero for.

    Args:
        progress: how far an earlier process came, whose sums these are; kept up to date.
        largest: `largest_product` of all shards, of which these may be a range.
        after_shard: called when a shard has been added.

    Raises:
        ReplayMismatch: a shard's v differs from that of the first pass.
    """
    active = [record for record in records if record.position in directions]
    tangents = Tangents(job, progress, largest)
    for record, following in pairwise([*active[progress.num_done :], None]):
        assert record is not None
        job.observer.step("replay", progress.num_done, len(active))
        contraction = tangents.take(record, directions[record.position])
        sums.add(contraction.gradients())
        progress.num_done += 1
        after_shard(progress, tangents.comparison)
        job.ready.feed.prefetch(None if following is None else following.position)
    progress.difference = tangents.comparison.finish()
    job.observer.step("replay", len(active), len(active))


def largest_product(
    dfdz: Mapping[Position, Tensor], directions: Mapping[Position, Tensor]
) -> Tensor:
    """Return the largest ‖dfdz_i‖‖u_i‖ over the shards that have a direction, 0-dim."""
    products = [norm([dfdz[position]]) * norm([u]) for position, u in directions.items()]
    return torch.stack(products).amax() if products else torch.zeros(())


class Tangents:
    """Takes J u of one shard after the other, by forward mode for as long as that works."""

    def __init__(self, job: PreparedMixed, progress: TangentProgress, largest: Tensor) -> None:
        """Begin.

        Args:
            progress: how far an earlier process came; kept up to date.
            largest: the largest ‖dfdz_i‖‖u_i‖, to which a shard's disagreement is compared.
        """
        self._progress = progress
        self._largest = largest
        self.comparison = ReplayComparison(job.ready.options.precision, largest=progress.difference)
        self._job = job

    def take(self, record: ShardRecord, u: Tensor) -> Contraction:
        """Return J u of a shard, contracted with a.

        Raises:
            ReplayMismatch: v differs from that of the first pass.
            NoTangent: an operation stands in the way of both ways to J u.
        """
        progress = self._progress
        if progress.obstacle is None:
            try:
                contraction = self._by_forward_mode(record, u)
            except ModelCallFailed as error:  # the same call went through in the first pass
                progress.obstacle = missing_rule(error)
            else:
                if contraction is not None:
                    return contraction
                progress.obstacle = DISAGREES
        # What stops one shard stops the next: the model is the same.
        progress.fallbacks[progress.obstacle] = progress.fallbacks.get(progress.obstacle, 0) + 1
        return self._by_double_backward(record, u)

    def _by_forward_mode(self, record: ShardRecord, u: Tensor) -> Contraction | None:
        self._job.ready.buffers.restore(record.before)
        linearised = self._job.jacobians.forward_mode(record.position, u)
        contraction = self._contract(record, linearised)
        off, near = self._disagreement(record, u, contraction, linearised.rounding)
        if not off <= near:
            return None
        self._compare(record, linearised)
        return contraction

    def _by_double_backward(self, record: ShardRecord, u: Tensor) -> Contraction:
        self._job.ready.buffers.restore(record.before)
        cotangents = partial(self._job.inner.cotangents, record.position)
        linearised = self._job.jacobians.double_transposed(record.position, u, cotangents)
        self._compare(record, linearised)
        contraction = self._contract(record, linearised)
        # Float32 may hide in a custom Function, and what a hook leaves out is more.
        rounding = max(linearised.rounding, torch.float32, key=lambda dtype: torch.finfo(dtype).eps)
        off, near = self._disagreement(record, u, contraction, rounding)
        if off > near and self._lacks_terms(record, u, off, rounding):
            raise self._job.jacobians.no_tangent(
                record.position, "a hook's backward pass without create_graph=True"
            )
        return contraction

    def _contract(self, record: ShardRecord, linearised: Linearised) -> Contraction:
        return self._job.inner.contract(record.position, linearised.outputs, linearised.tangents)

    def _compare(self, record: ShardRecord, linearised: Linearised) -> None:
        where = self._job.ready.calls.where(record.position)
        entries = {name: x for name, x in record.outputs.items() if name != DFDZ}
        self.comparison.compare(where, sketch(linearised.outputs), entries)

    def _disagreement(
        self, record: ShardRecord, u: Tensor, contraction: Contraction, rounding: torch.dtype
    ) -> tuple[float, float]:
        """Return |⟨a, J u⟩ - ⟨dfdz, u⟩|, and what of it may be rounding; waits for the device.

        Args:
            rounding: the dtype with the fewest digits in the call.
        """
        dfdz = record.outputs[DFDZ]
        error = (contraction.product.detach() - _inner_product(dfdz, u)).abs()
        scale = torch.maximum(contraction.scale, self._largest)
        tolerance = self._job.jacobians.tolerance(dfdz.dtype, rounding)
        return float(error), tolerance * float(scale)

    def _lacks_terms(
        self, record: ShardRecord, u: Tensor, off: float, rounding: torch.dtype
    ) -> bool:
        """Return whether J u lacks terms, for ⟨a, J u⟩ is `off` although aᵀJ is linear in a.

        It is, if three times a gives three times as much. What a hook bends, by clipping
        gradients, misses that by as much as J u is off.
        """
        size = torch.zeros(())

        def tripled(outputs: Outputs) -> Outputs:
            nonlocal size
            a = self._job.inner.cotangents(record.position, outputs)
            size = norm(a.values())
            return {name: 3 * cotangent for name, cotangent in a.items()}

        self._job.ready.buffers.restore(record.before)
        _, product = self._job.jacobians.transposed(record.position, tripled)
        missed = _inner_product(product, u) - 3 * _inner_product(record.outputs[DFDZ], u)
        noise = _ROUNDINGS * torch.finfo(rounding).eps * float(size * norm([u]))
        return noise < off > 4 * float(missed.abs())


def _inner_product(dfdz: Tensor, u: Tensor) -> Tensor:
    return (dfdz.to(u.dtype) * u).sum()
