"""Dropout masks that belong to samples, so that the cut into shards does not matter.

With `streams="sample"` the mask entry at coordinates c of random operation number k of a sample is
a hash of (seed, group, sample, k, c). It does not depend on which other samples are in the shard,
nor on how far the shard is padded. Covered: dropout in all its forms and in attention, and
stochastic depth, as long as the samples are along dim 0 of what is dropped (or dim 0 is samples ×
heads, as in attention). Attention runs by its plain formula, for the fused kernels draw inside.

Refused by name: every other random operation, operations that drop along another layout, Python's
and NumPy's generators, and activation checkpointing of the model's own, which would draw again
during backward.

The hash is MurmurHash3's 32-bit finaliser (Appleby 2008), one round per coordinate axis: about ten
integer operations an entry, several times the price of an ordinary mask. It looks random; it is not
meant to keep secrets. Not detected: a tensor with time along dim 0 whose length happens to be a
multiple of the number of samples, outside the modules of torch.nn known to have that layout.

Legend: b samples of a shard.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradbox_engine.errors import BadInputs, SampleStreamRefused
from gradbox_engine.model.calling.shard_feed import Position, permutation
from gradbox_engine.model.calling.shard_rng import generator_fingerprint
from gradbox_engine.requests import Group, Shard
from gradbox_engine.torch_private import TorchDispatchMode

aten = torch.ops.aten

GOLDEN = 0x9E3779B1 - 2**32  # as int32
MIX = ((16, 0x85EBCA6B - 2**32), (13, 0xC2B2AE35 - 2**32), (16, 1))


class SampleStreams:
    """The random numbers of a job, keyed by sample."""

    def __init__(self, model: nn.Module, groups: Sequence[Group], *, seed: int) -> None:
        """Number the samples of every group in the order in which the loss sees them.

        Raises:
            BadInputs: the arguments of a shard do not have their samples along dim 0.
            SampleStreamRefused: a submodule drops along another dimension.
        """
        _refuse_other_layouts(model)
        self._seed = seed
        self._samples: dict[Position, Tensor] = {}
        for index, group in enumerate(groups):
            sizes = [
                _num_samples(shard, group.name, place) for place, shard in enumerate(group.shards)
            ]
            numbers = torch.arange(sum(sizes))
            if group.order is not None:
                # Z = cat(z)[order]: row order[u] of the shards is sample u.
                numbers = permutation(group.order, sum(sizes), group=group.name).argsort()
            for place, samples_b in enumerate(torch.split(numbers, sizes)):
                self._samples[Position(index, place)] = samples_b

    @contextmanager
    def drawing(self, position: Position, device: torch.device) -> Iterator[None]:
        """Run a shard's forward pass.

        Raises:
            SampleStreamRefused: something random happened that cannot be keyed by sample.
        """
        before = generator_fingerprint()
        samples = self._samples[position].tolist()
        keys = [_key(self._seed, position.group, sample) for sample in samples]
        keys_b = torch.tensor(keys, dtype=torch.int64).to(torch.int32)
        if device.type == "cuda":  # from pinned memory, or the host would wait for the device
            keys_b = keys_b.pin_memory()
        keys_b = keys_b.to(device, non_blocking=True)
        self._drawn = _KeyedDropout(keys_b)
        with sdpa_kernel(SDPBackend.MATH), self._drawn:
            yield
        if generator_fingerprint() != before:
            raise SampleStreamRefused(
                'streams="sample": expected every random number to come from dropout, but a global '
                "generator (Python's random, NumPy's, or torch's) was drawn from; use "
                'streams="shard"'
            )

    def rerun(self) -> Callable[[], AbstractContextManager[None]]:
        """Return what draws once more the numbers that are drawn from here on."""
        return partial(_drawing_again, self._drawn.keys_b, self._drawn.num_operations)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Run a backward pass, in which nothing random may happen."""
        with _KeyedDropout(None):
            yield


@contextmanager
def _drawing_again(keys_b: Tensor | None, num_operations: int) -> Iterator[None]:
    with sdpa_kernel(SDPBackend.MATH), _KeyedDropout(keys_b, num_operations):
        yield


class _KeyedDropout(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces the masks that dropout draws, and refuses other random operations.

    With keys None, as in a backward pass, all of them are refused.
    """

    def __init__(self, keys_b: Tensor | None, num_operations: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys_b = keys_b
        self.num_operations = num_operations  # so far

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.bernoulli_.float:
            self_, keep = args[0], args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            return self_.copy_(self._mask(func, self_, keep))
        if func is aten.native_dropout.default:
            x, drop, train = args
            if train is False or drop == 0:
                return x.clone(), torch.ones_like(x, dtype=torch.bool)
            mask = self._mask(func, x, 1 - drop)
            return x * mask * (1 / (1 - drop) if drop < 1 else 0.0), mask
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _refused(func, "is not a dropout")
        return func(*args, **kwargs)

    def _mask(self, func: Any, like: Tensor, keep: float) -> Tensor:
        """Return the boolean mask of one operation, True with probability `keep`."""
        if self.keys_b is None:
            raise _refused(func, "draws during a backward pass")
        num_samples = self.keys_b.shape[0]
        if num_samples == 0 and like.numel() == 0:
            return torch.ones_like(like, dtype=torch.bool)
        if like.ndim == 0 or num_samples == 0 or like.shape[0] % num_samples:
            raise _refused(
                func,
                f"drops from shape {tuple(like.shape)}, whose dim 0 is not the {num_samples} "
                f"samples of the shard",
            )
        self.num_operations += 1
        h = _mixed(self.keys_b ^ (self.num_operations * GOLDEN) % 2**31)
        per_sample = like.shape[0] // num_samples
        axes = [*([per_sample] if per_sample != 1 else []), *like.shape[1:]]
        for size in axes:
            index = torch.arange(size, dtype=torch.int32, device=like.device) * GOLDEN
            h = _mixed(h.unsqueeze(-1) + index)
        if keep == 1:  # whose threshold is no int32
            return torch.ones_like(like, dtype=torch.bool)
        return ((h & 0x7FFFFFFF) < round(keep * 2**31)).view(like.shape)


def _mixed(h: Tensor) -> Tensor:
    """Return MurmurHash3's finaliser of int32 numbers; a fresh tensor."""
    for shift, factor in MIX:
        h = (h ^ ((h >> shift) & (2 ** (32 - shift) - 1))).mul_(factor)
    return h


def _key(seed: int, group: int, sample: int) -> int:
    text = f"gradbox/sample/{seed}/{group}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big", signed=True)


def _num_samples(shard: Shard, group: str, place: int) -> int:
    sizes = {name: v.shape[0] for name, v in shard.items() if isinstance(v, Tensor) and v.ndim}
    if len(set(sizes.values())) != 1:
        raise BadInputs(
            f'group {group!r}, shard {place}: streams="sample" expects the samples along dim 0 of '
            f"every argument, got sizes {sizes}"
        )
    return next(iter(sizes.values()))


def _refuse_other_layouts(model: nn.Module) -> None:
    for name, module in model.named_modules():
        between_layers = isinstance(module, nn.RNNBase) and module.num_layers > 1
        time_first = isinstance(module, nn.MultiheadAttention) and not module.batch_first
        if (between_layers or time_first) and module.training and float(module.dropout) > 0:
            raise SampleStreamRefused(
                f'streams="sample": {type(module).__name__} {name!r} drops with time along dim 0; '
                f'use streams="shard"'
            )


def _refused(func: Any, reason: str) -> SampleStreamRefused:
    return SampleStreamRefused(
        f'streams="sample": {func} {reason}, so it cannot be keyed by sample; use streams="shard"'
    )
