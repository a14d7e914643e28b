"""`mixed_gradient`: a derivative of derivatives through a frozen model.

    t = outer(dfdz, x),   dfdz = cat(dfdz_1 … dfdz_N),   dfdz_i = ∂inner(y, G(z_i))/∂z_i

With v_i = G(z_i), J_i = ∂v_i/∂z_i, a_i = ∂inner/∂v_i and u_i = ∂t/∂dfdz_i, and since
dfdz_i = a_iᵀJ_i depends on y through a_i alone:

    dt/dy = ∂outer/∂y + Σ_i ∂⟨a_i(y, v_i), J_i u_i⟩/∂y

so G is differentiated once, and only `inner` twice. There is no constant: no 1/N.

    forward      v_i, a_i and dfdz_i, through the graph of one shard
    cotangents   t and u_i
    replay       J_i u_i by forward mode, and its contraction's gradient

The forward-mode product is the R-operator of Pearlmutter 1994, "Fast Exact Multiplication by the
Hessian", section 3; here it meets G's first derivative alone.

Cost, with F and B one call of G and its backward with respect to z, and a tangent about as dear as
a call: N(3F + B). Double backward takes N(2F + B′), B′ > B being a backward that records itself.
Memory beyond the model: in the first pass one shard's graph, in the
tangent pass none; dfdz and ∂t/∂dfdz; of v, which may be much larger than z, only some entries, to
compare with.

Checked at run time: the tangent pass gives the first pass's v, and ⟨a_i, J_i u_i⟩ = ⟨dfdz_i, u_i⟩.

Not optimal: a shard is run again even if there were memory to keep its graph, and one shard whose
graph does not fit is not split.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Unpack

from torch import Tensor, nn

from gradbox_engine.checkpoint import Checkpoints
from gradbox_engine.errors import BadInputs
from gradbox_engine.mixed.first_pass import first_pass, sketch
from gradbox_engine.mixed.outer import differentiate_outer
from gradbox_engine.mixed.prepared import prepared_mixed
from gradbox_engine.mixed.sums import LeafSums
from gradbox_engine.mixed.tangents import TangentProgress, tangent_pass
from gradbox_engine.replay.checkpoint import JobCheckpoint
from gradbox_engine.replay.phase_timer import PhaseTimer
from gradbox_engine.requests import (
    CallKeywords,
    Group,
    MixedResult,
    MixedReturned,
    Objective,
    Observer,
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
    leaves = _leaves(inner, outer)
    with prepared_mixed(model, group, inner, leaves, z=z, observer=observer, **options) as job:
        sums = LeafSums(leaves)
        checkpoint = JobCheckpoint(checkpoints, job.ready, sums, compared=sketch)
        resumed = checkpoint.resumed()
        progress = TangentProgress.of(resumed.second)
        clock = PhaseTimer(*job.ready.devices)
        with clock.timed("forward"):
            first = first_pass(job, resumed.records, after_shard=checkpoint.after_first_call)
        with clock.timed("cotangents"):
            differentiated = differentiate_outer(job, outer, first)
        if not progress.num_done:
            sums.add(differentiated.direct)
        with clock.timed("replay"):
            tangent_pass(
                job,
                first,
                differentiated.directions,
                sums,
                progress=progress,
                after_shard=partial(checkpoint.after_second_call, first),
            )
    return MixedResult(
        value=differentiated.value,
        grads=sums.named(),
        unreached=sums.unreached(),
        shards={group.name: len(group.shards)},
        tangents=progress.num_done,
        fallbacks=progress.fallbacks,
        replay_difference=progress.difference,
        seconds=clock.seconds,
        dfdz=differentiated.dfdz if "dfdz" in returns else None,
    )


def _leaves(inner: Objective, outer: Objective) -> dict[str, Tensor]:
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
