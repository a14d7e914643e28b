"""The three phases of a mixed gradient, over the shards of one group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from gradbox_engine.checkpoint import Checkpoint
from gradbox_engine.errors import BadInputs, ModelCallFailed
from gradbox_engine.mixed.equipment import Equipment
from gradbox_engine.mixed.inner import Contraction, norm
from gradbox_engine.mixed.jacobian_products import Linearised, missing_rule
from gradbox_engine.mixed.sums import LeafSums
from gradbox_engine.model.outputs import BARE, Outputs
from gradbox_engine.model.precision import REPLAY_TOLERANCE, replay_tolerance
from gradbox_engine.model.shard_feed import Position
from gradbox_engine.replay.comparison import ReplayComparison
from gradbox_engine.replay.cotangents import differentiate, nonzero
from gradbox_engine.replay.shard_record import ShardRecord
from gradbox_engine.replay.z import ShardRows, concatenated
from gradbox_engine.requests import SOLE_GROUP, CallOptions, Group, Objective

SKETCH_ENTRIES = 4096
"""How many entries of v are kept of each shard and output, at equal distances, to compare with."""

DFDZ = "dfdz"
"""What dfdz_i is called in a shard's record, beside the entries of v."""

DISAGREES = "forward mode that disagrees with reverse mode"


@dataclass(frozen=True)
class OuterDifferentiated:
    """t and its derivatives: by y directly, and u = ∂t/∂dfdz by shard where it is not zero."""

    value: float
    direct: dict[str, Tensor]  # without what outer itself does not reach
    directions: dict[Position, Tensor]  # views of the next
    whole_directions: Tensor | None  # u of all shards in their order
    dfdz: Tensor


@dataclass
class TangentPass:
    """How far the tangent pass has come, and how it went."""

    num_done: int = 0  # shards that were added to the sums
    obstacle: str | None = None  # what is in the way of forward mode, once that is known
    fallbacks: dict[str, int] = field(default_factory=dict)
    difference: float = 0.0

    def state(self) -> Checkpoint:
        """Return all of it, for another process."""
        return Checkpoint({}, asdict(self))


def first_pass(
    equipment: Equipment,
    done: Sequence[ShardRecord],
    *,
    shards: Sequence[int] | None = None,
    after_shard: Callable[[Sequence[ShardRecord]], None] = lambda _records: None,
) -> list[ShardRecord]:
    """Take v, a and dfdz of every shard, in order, each through its own graph.

    Args:
        done: what an earlier process did of it.
        shards: consecutive ones; None takes all.
        after_shard: called with the records so far.
    """
    if shards is None:
        shards = range(len(equipment.ready.calls.groups[0].shards))
    observer, num_shards = equipment.observer, len(shards)
    buffers = equipment.ready.buffers
    before = done[-1].after if done else buffers.first
    buffers.restore(before)
    records = list(done)
    for shard, following in pairwise([*shards[len(done) :], None]):
        assert shard is not None
        observer.step("forward", len(records), num_shards)
        position = Position(0, shard)
        cotangents = partial(equipment.inner.cotangents, position)
        outputs, dfdz = equipment.jacobians.transposed(position, cotangents)
        after = buffers.advance(before)
        kept = {**sketch(outputs), DFDZ: dfdz}
        records.append(ShardRecord(position, kept, penalties=[], before=before, after=after))
        _check_alike(equipment, records[0], records[-1])
        before = after
        after_shard(records)
        equipment.ready.feed.prefetch(None if following is None else Position(0, following))
    observer.step("forward", num_shards, num_shards)
    return records


def differentiate_outer(
    equipment: Equipment,
    outer: Objective,
    records: Sequence[ShardRecord],
) -> OuterDifferentiated:
    """Evaluate t at dfdz and differentiate it there."""
    equipment.observer.step("cotangents", 0, 1)
    ready = equipment.ready
    group = ready.calls.groups[0]
    whole, num_rows = concatenated([group], {r.position: {BARE: r.outputs[DFDZ]} for r in records})
    rows = ShardRows([group], num_rows)
    for record, part in zip(records, rows.parts(whole).values(), strict=True):
        record.outputs[DFDZ] = part[BARE]  # a view of the whole, which is thus held once
    found = outer_at(whole, group, rows, outer, options=ready.options, device=ready.device)
    equipment.observer.step("cotangents", 1, 1)
    return found


def outer_at(
    dfdz: Mapping[str, Outputs],
    group: Group,
    rows: ShardRows,
    outer: Objective,
    *,
    options: CallOptions,
    device: torch.device,
) -> OuterDifferentiated:
    """Evaluate t at dfdz of all shards and differentiate it there.

    Args:
        dfdz: by the group's name, in the order of the shards.
    """
    unnamed = replace(group, name=SOLE_GROUP)  # outer is not told what the group is called
    found = differentiate(
        outer,
        {SOLE_GROUP: dfdz[group.name]},
        [unnamed],
        device=device,
        seed=options.seed,
        widened=options.widened,
        called="outer",
    )
    seen = found.seen[SOLE_GROUP]
    assert isinstance(seen, Tensor)
    cotangents = found.cotangents[SOLE_GROUP]
    directions = nonzero(rows.parts({group.name: cotangents}))
    return OuterDifferentiated(
        value=found.loss,
        direct={n: g for n, g in found.parameters.items() if n not in found.unreached},
        directions={position: part[BARE] for position, part in directions.items()},
        whole_directions=cotangents[BARE],
        dfdz=seen,
    )


def tangent_pass(
    equipment: Equipment,
    records: Sequence[ShardRecord],
    directions: Mapping[Position, Tensor],
    sums: LeafSums,
    *,
    went: TangentPass,
    largest: Tensor | None = None,
    after_shard: Callable[[TangentPass, ReplayComparison], None] = lambda *_: None,
) -> None:
    """Add ∂⟨a_i(y, v_i), J_i u_i⟩/∂y for every shard that u is not zero for.

    Args:
        went: how far an earlier process came, whose sums these are; kept up to date.
        largest: `largest_product` of all shards, where these are a range of them.
        after_shard: called when a shard has been added.

    Raises:
        ReplayMismatch: a shard's v differs from that of the first pass.
    """
    active = [record for record in records if record.position in directions]
    if largest is None:
        largest = largest_product({r.position: r.outputs[DFDZ] for r in active}, directions)
    tangents = _Tangents(equipment, went, largest)
    for record, following in pairwise([*active[went.num_done :], None]):
        assert record is not None
        equipment.observer.step("replay", went.num_done, len(active))
        contraction = tangents.take(record, directions[record.position])
        sums.add(contraction.gradients())
        went.num_done += 1
        after_shard(went, tangents.comparison)
        equipment.ready.feed.prefetch(None if following is None else following.position)
    went.difference = tangents.comparison.finish()
    equipment.observer.step("replay", len(active), len(active))


def largest_product(
    dfdz: Mapping[Position, Tensor], directions: Mapping[Position, Tensor]
) -> Tensor:
    """Return the largest ‖dfdz_i‖‖u_i‖ over the shards that have a direction, 0-dim."""
    products = [norm([dfdz[position]]) * norm([u]) for position, u in directions.items()]
    return torch.stack(products).amax() if products else torch.zeros(())


class _Tangents:
    """Takes J u of one shard after the other, by forward mode for as long as that works."""

    def __init__(self, equipment: Equipment, went: TangentPass, largest: Tensor) -> None:
        """Begin.

        Args:
            went: how far an earlier process came; kept up to date.
            largest: the largest ‖dfdz_i‖‖u_i‖, to which a shard's disagreement is compared.
        """
        self._went = went
        self._largest = largest
        self.comparison = ReplayComparison(
            equipment.ready.options.precision, largest=went.difference
        )
        self._equipment = equipment

    def take(self, record: ShardRecord, u: Tensor) -> Contraction:
        """Return J u of a shard, contracted with a.

        Raises:
            ReplayMismatch: v differs from that of the first pass.
            NoTangent: an operation stands in the way of both ways to J u.
        """
        went = self._went
        if went.obstacle is None:
            try:
                contraction = self._by_forward_mode(record, u)
            except ModelCallFailed as error:  # the same call went through in the first pass
                went.obstacle = missing_rule(error)
            else:
                if contraction is not None:
                    return contraction
                went.obstacle = DISAGREES
        # What stops one shard stops the next: the model is the same.
        went.fallbacks[went.obstacle] = went.fallbacks.get(went.obstacle, 0) + 1
        return self._by_double_backward(record, u)

    def _by_forward_mode(self, record: ShardRecord, u: Tensor) -> Contraction | None:
        self._equipment.ready.buffers.restore(record.before)
        linearised = self._equipment.jacobians.forward_mode(record.position, u)
        contraction = self._contract(record, linearised)
        if not self._agrees(record, u, contraction, rounding=linearised.rounding):
            return None
        self._compare(record, linearised)
        return contraction

    def _by_double_backward(self, record: ShardRecord, u: Tensor) -> Contraction:
        self._equipment.ready.buffers.restore(record.before)
        cotangents = partial(self._equipment.inner.cotangents, record.position)
        linearised = self._equipment.jacobians.double_transposed(record.position, u, cotangents)
        self._compare(record, linearised)
        return self._contract(record, linearised)

    def _contract(self, record: ShardRecord, linearised: Linearised) -> Contraction:
        return self._equipment.inner.contract(
            record.position, linearised.outputs, linearised.tangents
        )

    def _compare(self, record: ShardRecord, linearised: Linearised) -> None:
        where = self._equipment.ready.calls.where(record.position)
        entries = {name: x for name, x in record.outputs.items() if name != DFDZ}
        self.comparison.compare(where, sketch(linearised.outputs), entries)

    def _agrees(
        self, record: ShardRecord, u: Tensor, contraction: Contraction, *, rounding: torch.dtype
    ) -> bool:
        """Return whether ⟨a, J u⟩ = ⟨dfdz, u⟩ within rounding; waits for the device.

        Args:
            rounding: the dtype with the fewest digits in the call.
        """
        dfdz = record.outputs[DFDZ]
        expected = (dfdz.to(u.dtype) * u).sum()
        error = (contraction.product.detach() - expected).abs()
        scale = torch.maximum(contraction.scale, self._largest)
        tolerance = replay_tolerance(self._equipment.ready.options.precision, dfdz.dtype)
        tolerance = max(tolerance, REPLAY_TOLERANCE.get(rounding, REPLAY_TOLERANCE[torch.bfloat16]))
        if self._equipment.jacobians.scaled:
            tolerance = max(tolerance, REPLAY_TOLERANCE["fp16"])
        return bool(error <= tolerance * scale)


def sketch(outputs: Outputs) -> Outputs:
    """Return copies of some entries of each output: v may be much larger than z."""
    sketched = {}
    for name, value in outputs.items():
        flat = value.detach().flatten()
        sketched[f"v/{name}"] = flat[:: max(1, flat.numel() // SKETCH_ENTRIES)].clone()
    return sketched


def _check_alike(equipment: Equipment, first: ShardRecord, record: ShardRecord) -> None:
    one, other = first.outputs[DFDZ], record.outputs[DFDZ]
    if one.shape[1:] != other.shape[1:] or one.dtype != other.dtype:
        raise BadInputs(
            f"{equipment.ready.calls.where(record.position)}: expected the z of all shards to have "
            f"one dtype and to differ in dim 0 alone, got {other.dtype} {tuple(other.shape)} after "
            f"{one.dtype} {tuple(one.shape)}; pad them to one shape"
        )
