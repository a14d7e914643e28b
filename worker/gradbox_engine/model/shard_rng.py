"""The random numbers of one shard.

Shard i of group k draws from generators seeded from (seed, k, i) alone, so its dropout masks do not
depend on what ran before it, in which process, or whether it is a replay. Covered: torch's default
generators (CPU, every CUDA device, MPS), Python's `random` and NumPy's legacy global generator.

Not covered: a `torch.Generator`, `random.Random` or `numpy.random.Generator` that a model keeps as
its own attribute. The comparison after each replay catches those.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch

try:
    import numpy
except ImportError:
    numpy = None  # type: ignore[assignment]

TWISTER_BYTES: Final = 4 * (624 + 1)
"""Of a Mersenne Twister: its 624 words, and which of them comes next."""


@contextmanager
def shard_stream(seed: int, group: int, shard: int) -> Iterator[None]:
    """Seed every global generator for one shard, and put all of them back on the way out.

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
    before = _generator_states()
    try:
        yield
    finally:
        _restore_generators(before)


def begin_stream(seed: int, group: int, shard: int) -> None:
    """Seed every global generator for one shard; for callers that put them back later."""
    _seed_generators(stream_seed(seed, group, shard))


def stream_seed(seed: int, group: int, shard: int) -> int:
    """Return the 64-bit seed of a shard's stream: BLAKE2b over the three numbers."""
    text = f"gradbox/shard/{seed}/{group}/{shard}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def generator_fingerprint() -> tuple[object, ...]:
    """Return something that differs after anything has drawn from a global generator."""
    states = _generator_states()
    drawn: list[object] = [states["python"]]
    for tensor in (states["cpu"], *states.get("cuda", []), *states.get("mps", [])):
        drawn.append(tensor.numpy().tobytes())
    drawn.append(states.get("numpy"))
    return tuple(drawn)


def _generator_states() -> dict[str, Any]:
    states: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    if numpy is not None:
        states["numpy"] = _numpy_state()
    if _cuda_runs():
        states["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        states["mps"] = [torch.mps.get_rng_state()]
    return states


def _seed_generators(derived: int) -> None:
    random.seed(derived)
    torch.default_generator.manual_seed(derived)
    if numpy is not None:
        numpy.random.seed(derived & 0xFFFFFFFF)  # an array of both halves takes 0.1 ms to seed with
    if _cuda_runs():
        torch.cuda.manual_seed_all(derived)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(derived)


def _cuda_runs() -> bool:
    """Return whether CUDA is in use; asking its generators would otherwise start it."""
    running: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return running


def _restore_generators(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["cpu"])
    if numpy is not None:
        _restore_numpy(states["numpy"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])
    if "mps" in states:
        torch.mps.set_rng_state(states["mps"][0])


class NumpyState(NamedTuple):
    """NumPy's global generator: its bytes, and the normal number that it keeps for the next call.

    `numpy.random.get_state` makes 624 numbers of the bytes, in 0.1 ms: as long as a small model
    takes.
    """

    twister: bytes
    normal: float | None


def _numpy_state() -> NumpyState:
    before = ctypes.string_at(_twister(), TWISTER_BYTES)
    normal = numpy.random.standard_normal()  # a number that was kept leaves the twister as it is
    kept = ctypes.string_at(_twister(), TWISTER_BYTES) == before
    state = NumpyState(before, normal if kept else None)
    _restore_numpy(state)
    return state


def _restore_numpy(state: NumpyState) -> None:
    numpy.random.seed(0)  # forgets a normal number
    ctypes.memmove(_twister(), state.twister, TWISTER_BYTES)
    if state.normal is not None:
        kept = {"has_gauss": 1, "gauss": state.normal}
        numpy.random.set_state(numpy.random.get_state(legacy=False) | kept)


def _twister() -> int:
    address: int = numpy.random.get_bit_generator().ctypes.state_address  # type: ignore[attr-defined]
    return address
