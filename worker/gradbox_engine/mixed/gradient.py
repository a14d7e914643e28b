"""`mixed_gradient`: a derivative of derivatives through a frozen model.

    t = outer(dfdz, x),   dfdz = cat(dfdz_1 … dfdz_N),   dfdz_i = ∂inner(y, G(z_i))/∂z_i

With v_i = G(z_i), J_i = ∂v_i/∂z_i, a_i = ∂inner/∂v_i and u_i = ∂t/∂dfdz_i, and since
dfdz_i = a_iᵀJ_i depends on y through a_i alone:

    dt/dy = ∂outer/∂y + Σ_i ∂⟨a_i(y, v_i), J_i u_i⟩/∂y

so G is differentiated once, and only `inner` twice. There is no constant: no 1/N.

    each range r    v_i, a_i and dfdz_i, through the graph of one shard     RangeDevice.forward
    here            t and u_i
    each range r    J_i u_i by forward mode, and its contraction's gradient   RangeDevice.replay
    in a tree       the sum over ranges                                     Devices.added

On one device there is one range. ∂outer/∂y is what the sum of range 0 begins with.

The forward-mode product is the R-operator of Pearlmutter 1994, "Fast Exact Multiplication by the
Hessian", section 3; here it meets G's first derivative alone.

Cost, with F and B one call of G and its backward with respect to z, and a tangent about as dear as
a call: N(3F + B), divided among the devices, and for every range but the first at most one forward
more, see `independence`. Double backward takes N(2F + B′), B′ > B being a backward that records
itself. Memory beyond the model: in the first pass one shard's graph, in the tangent pass none; dfdz
and ∂t/∂dfdz; of v, which may be much larger than z, only some entries, to compare with.

Checked at run time: the tangent pass gives the first pass's v, and ⟨a_i, J_i u_i⟩ = ⟨dfdz_i, u_i⟩.

Not optimal: a shard is run again even if there were memory to keep its graph, and one shard whose
graph does not fit is not split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Unpack

import torch
from torch import Tensor, nn

from gradbox_engine.checkpoint import Checkpoints, NoCheckpoints
from gradbox_engine.errors import BadInputs
from gradbox_engine.mixed.held_passes import DirectionsOfRange, held_mixed
from gradbox_engine.mixed.outer import OuterDifferentiated, outer_at
from gradbox_engine.mixed.tangents import largest_product
from gradbox_engine.model.calling.outputs import BARE
from gradbox_engine.model.kernels import differentiable_kernels
from gradbox_engine.ranges.joining import joined, joined_rows, range_cotangents
from gradbox_engine.ranges.one_device import OneDevice, one_range
from gradbox_engine.ranges.protocol import HOST, Devices, Range, RangeOutputs
from gradbox_engine.ranges.reduction import completed
from gradbox_engine.ranges.split_job import SplitJob
from gradbox_engine.replay.phase_timer import PhaseTimer
from gradbox_engine.replay.z import ShardRows
from gradbox_engine.requests import (
    CallKeywords,
    CallOptions,
    Group,
    MixedResult,
    MixedReturned,
    Objective,
    Observer,
    Recomputed,
    Silent,
)


def mixed_gradient(
    model: nn.Module,
    group: Group,
    inner: Objective,
    outer: Objective,
    *,
    z: str | None = None,
    returns: Collection[MixedReturned] = (),
    observer: Observer | None = None,
    checkpoints: Checkpoints | None = None,
    **options: Unpack[CallKeywords],
) -> MixedResult:
    """Return dt/dy for t = outer(dfdz, x), dfdz_i = ∂inner(y, G(z_i))/∂z_i.

    Args:
        model: G; bit-identical afterwards, also after an error.
        group: shards of G's arguments; all but z are constants. Stream and buffers of a shard are
            those that it has in `set_gradient`.
        inner: called with its inputs and v = G(z_i) by name, `v`; returns one number. Its
            parameters, y, are leaves: members of its inputs, or of a module that it calls.
        outer: called with dfdz, shards along dim 0, and its inputs by name; returns one number. Its
            parameters may be leaves of `inner`, under the same names.
        z: the shards' argument that is z; None takes the first floating-point one.
        returns: "dfdz" gives it back beside the gradients.
        checkpoints: where the state of a long job is written, and read when it begins again.
        options: how the model is called, see `CallOptions`; `output` and `readout` choose v.

    Raises:
        EngineError: see `errors`; each says what was expected, what came, and what to do.
        torch.OutOfMemoryError: one shard's graph does not fit.
    """
    with held_mixed(
        model,
        group,
        inner,
        leaves_of(inner, outer),
        z=z,
        observer=observer,
        checkpoints=lambda _: checkpoints or NoCheckpoints(),
        **options,
    ) as job:
        return split_mixed_gradient(
            OneDevice(job),
            one_range([group]),
            group,
            outer,
            returns=returns,
            device=job.device,
            observer=observer,
            **options,
        )


def split_mixed_gradient(
    devices: Devices,
    parts: Sequence[Range],
    group: Group,
    outer: Objective,
    *,
    returns: Collection[MixedReturned] = (),
    device: torch.device = HOST,
    observer: Observer | None = None,
    **options: Unpack[CallKeywords],
) -> MixedResult:
    """Return dt/dy; the arguments are those of `mixed_gradient` and of `split_set_gradient`.

    Args:
        devices: each holds the job ready, see `held_mixed`.
        outer: runs here.

    Raises:
        CoupledShards: the shards cannot be split; the job needs one range.
        DeviceLost: no device is left, or one range has lost too many.
        EngineError: see `mixed_gradient`.
    """
    call_options, observer, clock = CallOptions(**options), observer or Silent(), PhaseTimer(device)
    job = SplitJob(devices, parts, [group], precision=call_options.precision)
    with clock.timed("forward"):
        gathered = job.forward()
    with clock.timed("cotangents"):
        observer.step("cotangents", 0, 1)
        differentiated, directions = devices.between_phases(
            lambda: _directions(gathered, parts, group, outer, call_options, device=device),
            call_options.precision,
        )
        observer.step("cotangents", 1, 1)
    with clock.timed("replay"):
        tangents = job.replay(directions)
        sums = job.total()
    parameters = tangents[0].parameters
    fallbacks: Counter[str] = Counter()
    for of_range in tangents:
        fallbacks.update(of_range.fallbacks)
    return MixedResult(
        value=differentiated.value,
        grads=completed(sums, parameters, device=device),
        unreached=tuple(name for name in parameters if name not in sums),
        shards={group.name: len(group.shards)},
        tangents=sum(of_range.replayed for of_range in tangents),
        fallbacks=dict(fallbacks),
        recomputed=Recomputed.joined(of_range.recomputed for of_range in tangents),
        replay_difference=max(of_range.replay_difference for of_range in tangents),
        seconds=clock.seconds,
        ranges=job.runs(),
        dfdz=differentiated.dfdz if "dfdz" in returns else None,
    )


def _directions(
    gathered: Sequence[RangeOutputs],
    parts: Sequence[Range],
    group: Group,
    outer: Objective,
    options: CallOptions,
    *,
    device: torch.device,
) -> tuple[OuterDifferentiated, list[DirectionsOfRange]]:
    """Return t and its derivatives, and what each range needs of them."""
    groups = [group]
    rows = [outputs.rows for outputs in gathered]
    shard_rows = ShardRows(groups, joined_rows(groups, rows))
    dfdz = joined(groups, gathered, device=device)
    with differentiable_kernels():
        differentiated = outer_at(dfdz, group, shard_rows, outer, options=options, device=device)
    of_shard = {position: part[BARE] for position, part in shard_rows.parts(dfdz).items()}
    largest = largest_product(of_shard, differentiated.directions)
    asked = range_cotangents(
        groups,
        parts,
        rows,
        {group.name: {BARE: differentiated.whole_directions}},
        differentiated.directions,
        norms=[outputs.norms for outputs in gathered],
    )
    return differentiated, [
        DirectionsOfRange(
            **vars(of_range),
            largest=largest,
            direct=differentiated.direct if part.index == 0 else {},
        )
        for part, of_range in zip(parts, asked, strict=True)
    ]


def leaves_of(inner: Objective, outer: Objective) -> dict[str, Tensor]:
    """Return y: the leaves of both functions by name.

    Raises:
        BadInputs: there is none, or one name stands for two tensors.
    """
    for name, leaf in outer.parameters.items():
        if inner.parameters.get(name, leaf) is not leaf:
            raise BadInputs(
                f"y: expected {name!r} to be one tensor in inner and outer, got two; give one of "
                f"them another name"
            )
    leaves = {**inner.parameters, **outer.parameters}
    if not leaves:
        raise BadInputs(
            "y: expected at least one tensor to differentiate with respect to, got none; give "
            "inner or outer parameters"
        )
    return leaves
