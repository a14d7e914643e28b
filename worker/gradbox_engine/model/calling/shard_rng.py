"""The random numbers of one shard.

Shard i of group k draws from generators seeded from (seed, k, i) alone, so its dropout masks do not
depend on what ran before it, in which process, or whether it is a replay. Covered: torch's default
generators (CPU, every CUDA device, MPS), Python's `random` and NumPy's legacy global generator.

Not seeded: a `torch.Generator`, `random.Random` or `numpy.random.Generator` that a model keeps as
its own. It goes on from shard to shard, as the rest of the model's state: see `state`.

NumPy's functions draw from another bit generator meanwhile, so the user's is not touched, whatever
its kind: to read or to write its 624 words takes longer than all others together. Not put back: the
second normal number of a pair, which those functions keep beside it for their next call.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, NamedTuple

import torch

try:
    import numpy.random  # which NumPy imports on first use
except ImportError:
    numpy = None  # type: ignore[assignment]

_spare_twisters: list[Any] = []  # made in 0.1 ms each; every use seeds them first


@contextmanager
def shard_stream(seed: int, group: int, shard: int) -> Iterator[None]:
    """Seed every global generator for one shard, and put all of them back on the way out.

        for i, x in enumerate(shards):
            with shard_stream(seed, group=0, shard=i):
                zs.append(model(**x))  # with the dropout masks of the box

    Args:
        seed: the job's seed.
        group: position of the shard's group among the groups.
        shard: position of the shard in its group.
    """
    with generators_restored():
        begin_stream(seed, group, shard)
        yield


@contextmanager
def generators_restored() -> Iterator[None]:
    """Put every global generator back on the way out."""
    before = [(generator.write, generator.read()) for generator in _generators()]
    functions: Any = None if numpy is None else numpy.random  # whose stubs lack some of it
    if functions is not None:
        bit_generator = functions.get_bit_generator()
        meanwhile = _spare_twisters.pop() if _spare_twisters else functions.MT19937(0)
        functions.set_bit_generator(meanwhile)
        functions.seed(0)
    try:
        yield
    finally:
        for write, state in before:
            write(state)
        if functions is not None:
            functions.set_bit_generator(bit_generator)
            _spare_twisters.append(meanwhile)


def begin_stream(seed: int, group: int, shard: int) -> None:
    """Seed every global generator for one shard; for callers that put them back later."""
    derived = stream_seed(seed, group, shard)
    for generator in _generators():
        generator.seed(derived)
    if numpy is not None:
        numpy.random.seed(derived & 0xFFFFFFFF)  # an array of both halves takes 0.1 ms to seed with


def stream_seed(seed: int, group: int, shard: int) -> int:
    """Return the 64-bit seed of a shard's stream: BLAKE2b over the three numbers."""
    text = f"gradbox/shard/{seed}/{group}/{shard}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def generator_fingerprint() -> tuple[object, ...]:
    """Return something that differs after anything has drawn from a global generator."""
    drawn: list[object] = []
    for generator in _generators():
        state = generator.read()
        tensors = state if isinstance(state, list) else [state]
        drawn += [t.numpy().tobytes() if isinstance(t, torch.Tensor) else t for t in tensors]
    if numpy is not None:
        of_numpy = numpy.random.get_state(legacy=False)
        twister = of_numpy["state"]
        drawn.append((twister["key"].tobytes(), twister["pos"], of_numpy["has_gauss"]))
    return tuple(drawn)


States = list[tuple[Callable[[Any], object], Any]]
"""What writes the state of a generator, and the state."""


def generator_states() -> States:
    """Return where every global generator is now."""
    states: States = [(generator.write, generator.read()) for generator in _generators()]
    if numpy is not None:
        states.append((numpy.random.set_state, numpy.random.get_state(legacy=False)))
    return states


@contextmanager
def generators_at(states: States) -> Iterator[None]:
    """Put every global generator where it was, and back on the way out."""
    with generators_restored():
        for write, state in states:
            write(state)
        yield


class _Generator(NamedTuple):
    """How a generator that all share is read, put back and seeded."""

    read: Callable[[], Any]
    write: Callable[[Any], object]
    seed: Callable[[int], object]


_ON_HOST: Final[tuple[_Generator, ...]] = (
    _Generator(random.getstate, random.setstate, random.seed),
    _Generator(
        torch.default_generator.get_state,
        torch.default_generator.set_state,
        torch.default_generator.manual_seed,
    ),
)


def _generators() -> tuple[_Generator, ...]:
    """Return all global generators but NumPy's."""
    found = _ON_HOST
    cuda, mps = torch.cuda, torch.mps
    if cuda.is_initialized():  # type: ignore[no-untyped-call]  # asking would otherwise start it
        of_cuda = cuda.get_rng_state_all, cuda.set_rng_state_all, cuda.manual_seed_all
        found = (*found, _Generator(*of_cuda))
    if _mps_is_available():
        found = (*found, _Generator(mps.get_rng_state, mps.set_rng_state, mps.manual_seed))
    return found


_mps_is_available = cache(torch.backends.mps.is_available)
