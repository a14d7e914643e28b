"""A seeded random projection that any machine computes alike, and that splits over outer products.

A parameter of shape (R, ...) is read as a matrix of R rows and C columns. Entry (r, c) is added to
bucket (h₁(r) + h₂(c)) mod dim with the sign s₁(r) s₂(c). The expectation of ⟨Sx, Sy⟩ over seeds is
⟨x, y⟩, its variance at most of the order ‖x‖²‖y‖²/dim. Because bucket and sign split over row and
column, the projection of an outer product is the circular convolution of two short sketches, which
an FFT gives without forming the product.

h and s come from a hash of (seed, parameter name, axis, index) in wrapping 64-bit integers: no
generator, no state, the same on every device.

Source: Pham and Pagh 2013, "Fast and scalable polynomial kernels via explicit feature maps" (the
sketch); Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators" (the mixer).
Doubt: pairwise independence of the mixer is assumed, not proved.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gradbox_factors.slabs import cached_bytes, slabs

_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_GOLDEN = 0x9E3779B97F4A7C15
SIGNS_A_WORD = 32


@dataclass(frozen=True)
class Sketch:
    """The projection to `dim` numbers that `seed` names."""

    dim: int
    seed: int = 0

    def axis(
        self, parameter: str, axis: int, size: int, *, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return bucket (int64) and sign (±1, int64) of every index of one axis, shape (size,)."""
        return _axis(self.dim, self.seed, parameter, axis, size, device)

    def grid(
        self, parameter: str, start: int, stop: int, columns: int, *, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return bucket and sign of rows start:stop, shape (stop - start, columns)."""
        index = torch.arange(start, stop, device=device)
        row_bucket, row_sign = _hashed(index, self.dim, self.seed, parameter, 0)
        bucket, sign = self.axis(parameter, 1, columns, device=device)
        return (row_bucket[:, None] + bucket) % self.dim, row_sign[:, None] * sign

    def spread(self, x: Tensor, parameter: str, axis: int) -> Tensor:
        """Sketch the last dim of `x` (..., n) by one axis' hash, shape (..., dim)."""
        bucket, sign = self.axis(parameter, axis, x.shape[-1], device=x.device)
        out = x.new_zeros(*x.shape[:-1], self.dim)
        for start, stop in slabs(len(bucket), x.nbytes, cached_bytes(x.device)):
            signed = x[..., start:stop] * sign[start:stop].to(x.dtype)
            out.index_add_(-1, bucket[start:stop], signed)
        return out


@lru_cache(maxsize=64)
def _axis(
    dim: int, seed: int, parameter: str, axis: int, size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    return _hashed(torch.arange(size, device=device), dim, seed, parameter, axis)


def _hashed(index: Tensor, dim: int, seed: int, parameter: str, axis: int) -> tuple[Tensor, Tensor]:
    bits = mixed(step(index) + hash_key(seed, parameter, axis))
    bucket = shifted(bits, 1) % dim
    sign = 1 - 2 * (bits & 1)
    return bucket, sign


def hash_key(seed: int, parameter: str, of: int | str) -> int:
    """Return the 64 bits, as a signed number, that the hashes of one parameter begin from."""
    digest = hashlib.sha256(f"{seed}\0{parameter}\0{of}".encode()).digest()
    return _signed(int.from_bytes(digest[:8], "little"))


def step(index: Tensor) -> Tensor:
    """Spread indices over the 64 bits, as SplitMix64 does before it mixes them."""
    return index * _signed(_GOLDEN)


def mixed(bits: Tensor) -> Tensor:
    """The finaliser of SplitMix64 on int64, whose products wrap."""
    bits = (bits ^ shifted(bits, 30)) * _signed(_MIX[0])
    bits = (bits ^ shifted(bits, 27)) * _signed(_MIX[1])
    return bits ^ shifted(bits, 31)


def random_signs(bits: Tensor, count: int) -> Tensor:
    """Return `count` signs ±1 for each of n numbers of 64 mixed bits, (n, count) of int64."""
    words = torch.arange(-(-count // SIGNS_A_WORD), device=bits.device)
    drawn = mixed(bits[:, None] + step(words + 1))
    return signs_of(drawn)[:, :count]


def signs_of(words: Tensor) -> Tensor:
    """Return the low bits of each word as ±1, (n, words · SIGNS_A_WORD) of int64."""
    places = torch.arange(SIGNS_A_WORD, device=words.device)
    return (1 - 2 * ((words[..., None] >> places) & 1)).flatten(1)


def shifted(bits: Tensor, by: int) -> Tensor:
    """Shift right filling with zeros; int64 alone would repeat the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value
