"""Where samples meet: places in the probe runs in which other samples than the replaced one differ.

If one shows in z, the samples have no rows of their own. If none does, a layer may still mix them:
what follows undoes it, or multiplies it by zero. That is left to data, so the rows of every shard
are compared.

Shapes: B samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple, NoReturn

import torch
from torch import Tensor

from gradbox_engine.errors import CoupledSamples
from gradbox_engine.model.tensor_equality import same_values
from gradbox_engine.per_sample.planning.probed_use import ProbeUses
from gradbox_engine.per_sample.recording.batch_axis import (
    CHANGED,
    EXTRA,
    BatchAxis,
    changed_dim,
    others_equal,
    samples_that_differ,
)

BAGS: Final = (
    "The ids of an EmbeddingBag with offsets are no samples: give it ids of shape "
    "(samples, ids of each), filled up with its padding_idx, and no offsets"
)


class Mixing(NamedTuple):
    """A tensor that may hold several samples' numbers in one place."""

    place: str
    seen: bool  # whether another sample than the replaced one differs in it


def others_differ(second: Tensor, third: Tensor, axis: BatchAxis) -> bool:
    """Return whether a sample other than `CHANGED` differs beyond rounding."""
    if others_equal(second, third, axis):
        return False  # no rounding to be told from a difference
    differs = samples_that_differ(second, third, axis)
    differs[CHANGED] = False
    return bool(differs.any())


def refuse_coupling(uses: ProbeUses) -> NoReturn:
    """Raise the error that names the first module in which samples meet."""
    places = (mixing.place for mixing in mixing_layers(uses) if mixing.seen)
    where = next(places, "the model") if uses.alike else "the model"
    does = (
        BAGS
        if "(embedding_bag)" in where
        else "Batch norm in train mode does this: use mode='eval', or replace it by group norm; so "
        "does the step that a solver chooses for all samples: fix it"
    )
    raise CoupledSamples(
        f"replacing one sample changed the output of others; first seen in {where}: a sample then "
        f"has no gradient of its own. {does}. unchecked=('coupling',) turns this check off"
    )


@torch.no_grad()
def mixing_layers(uses: ProbeUses) -> Iterator[Mixing]:
    """Yield the places in which samples meet, or may; the runs called the same functions."""
    compared: set[int] = set()
    for one, two, three in zip(uses.first, uses.second, uses.third, strict=True):
        function = getattr(one.function, "__name__", str(one.function))
        for inputs, prefix in ((True, "what enters "), (False, "")):
            runs = (run.inputs if inputs else run.outputs for run in (one, two, three))
            for a, b, c in zip(*runs, strict=False):  # `torch.cat([q] * B)`: a tensor a sample
                if b is c or id(b) in compared:
                    continue
                compared.add(id(b))
                seen = _mixed(a, b, c, uses)
                if seen is not None:
                    yield Mixing(f"{prefix}{one.module or 'the model'!r} ({function})", seen)


def _mixed(a: Tensor, b: Tensor, c: Tensor, uses: ProbeUses) -> bool | None:
    """Return `Mixing.seen` of a tensor of the three runs, None where samples do not meet in it."""
    if any(map(torch._C._functorch.is_functorch_wrapped_tensor, (a, b, c))):
        return False  # of a `torch.func` call that is over: its numbers cannot be read any more
    dim = changed_dim(a.shape, b.shape)
    if dim is not None and dim < 0:  # samples in two dims, as in a matrix that multiplies them
        return False
    if a.layout is not torch.strided:
        return None if same_values(b, c) else False
    if dim is None:  # of no sample, yet another if a sample is: a mean over the batch
        return False if b.shape != c.shape or not torch.equal(b, c) else None
    # An order is found for samples in a merged dim only where no other sample differs in it.
    merged = (a.shape[dim], b.shape[dim]) != (uses.samples, uses.samples + EXTRA)
    if merged or b.shape != c.shape:  # rows that data chose may be as many as samples
        return None
    return True if others_differ(b, c, BatchAxis(dim)) else None
