"""The random numbers of one shard.

Shard i of group k draws from generators seeded from (seed, k, i) alone, so its dropout masks do not
depend on what ran before it, in which process, or whether it is a replay. Covered: torch's default
generators (CPU, every CUDA device, MPS), Python's `random` and NumPy's legacy global generator.

Not seeded: a `torch.Generator`, `random.Random` or `numpy.random.Generator` that a model keeps as
its own. It goes on from shard to shard, as the rest of the model's state: see `state`.

NumPy's functions draw from another bit generator meanwhile, so the user's is not touched, whatever
its kind. To write its 624 words back takes 0.1 ms, a third of a small model's training step.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple

import torch

try:
    import numpy.random  # which NumPy imports on first use
except ImportError:
    numpy = None  # type: ignore[assignment]

_spare_twisters: list[Any] = []  # made in 0.1 ms each; every use seeds them first
_open: list[_Before] = []  # of every `generators_restored` that is open, the first one first
_exchange = threading.RLock()  # held while the two above change


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
    """Put every global generator back on the way out.

    Jobs that overlap may end in another order than they began: of what is open, the one that began
    next then puts back what this one found. In threads they draw from the same generators, in no
    order that can be told; what was found is put back all the same.
    """
    with _exchange:
        before = _Before.found()
        _open.append(before)
    try:
        yield
    finally:
        with _exchange:
            place = _open.index(before)
            del _open[place]
            if place < len(_open):
                _open[place].take_over(before)
            else:
                before.put_back()


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


@dataclass(eq=False)
class _Before:
    """What a `generators_restored` found; of NumPy nothing where there is none."""

    generators: list[tuple[Callable[[Any], object], Any]]  # what writes a state, and the state
    bit_generator: Any = None  # what NumPy's functions drew from
    numpy_state: Any = None  # its state, and the normal number that is kept for the next call
    meanwhile: Any = None  # what they draw from until then

    @classmethod
    def found(cls) -> _Before:
        """Note all states, and let NumPy's functions draw from another bit generator."""
        before = cls([(generator.write, generator.read()) for generator in _generators()])
        if numpy is not None:
            functions: Any = numpy.random  # whose stubs lack some of it
            before.bit_generator = functions.get_bit_generator()
            before.numpy_state = functions.get_state(legacy=False)
            before.meanwhile = _spare_twisters.pop() if _spare_twisters else functions.MT19937(0)
            functions.set_bit_generator(before.meanwhile)
            functions.seed(0)
        return before

    def put_back(self) -> None:
        """Let all functions draw from that again."""
        for write, state in self.generators:
            write(state)
        if numpy is not None:
            functions: Any = numpy.random
            functions.set_bit_generator(self.bit_generator)
            if self.numpy_state["has_gauss"]:  # forgotten by the setter
                functions.set_state(self.numpy_state)
            _spare_twisters.append(self.meanwhile)

    def take_over(self, earlier: _Before) -> None:
        """Put back later what an earlier one, which ends now, would have put back."""
        if earlier.meanwhile is not None:
            _spare_twisters.append(earlier.meanwhile)
        self.generators = earlier.generators
        self.bit_generator, self.numpy_state = earlier.bit_generator, earlier.numpy_state
