"""Gradients in 16 bits on their way into a result file: rounded to nearest, within a stated bound.

A number x of the format's normal range is off by u |x| at most, u being 2^-8 in bf16 and 2^-11 in
fp16; one below that range by half the distance of its neighbours there, u times the smallest normal
number (2^-25 in fp16, whose range ends at 6e-5). So of a gradient g of n numbers

    ‖round(g) − g‖ / ‖g‖ ≤ u + u m √n / ‖g‖,    m = 2^-14 in fp16, 2^-126 in bf16

and never more than 1. The receipt states the largest of these bounds, over the gradients or, of
per-sample jobs, the rows of each parameter; a row that is written in parts counts by its parts. The
second term is left out where a float32 becomes a bf16: both have one range. A float64 is rounded to
float32 first, as torch does it, which adds 2^-24: the first rounding has that much room.

Source: Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 2.1.

No finite number becomes infinite. A gradient that the format does not hold (beyond 65504 in fp16)
stays in its own dtype, and the receipt names it; rows have their place in the file before they are
known, so there it ends the job. docs/wire.md, "Gradients in 16 bits", states the form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from gradbox.errors import InvalidInputs
from gradbox.protocol.options import TRANSFER_DTYPES, Transfer
from gradbox.results.result_files import ROUNDED
from gradbox_worker.files.safetensors_types import SAFETENSORS_NAMES

FORMATS: Final[Mapping[Transfer, torch.dtype]] = {
    transfer: getattr(torch, dtype) for transfer, dtype in TRANSFER_DTYPES.items()
}
SECTIONS: Final = ("grads/", "input_grads/")


@dataclass(frozen=True)
class Measured:
    """What rounding did in another process.

    Attributes:
        error: the largest bound so far.
        dtypes: what the gradients had before.
        kept: names of those that stayed in their own.
    """

    error: float
    dtypes: Mapping[str, str]
    kept: tuple[str, ...] = ()


class RoundedGradients:
    """The format of one job's gradients; "exact" leaves all as it is.

    Attributes:
        error: the largest bound of a relative error of the rounding so far.
    """

    def __init__(self, transfer: Transfer) -> None:
        self.error = 0.0
        self._transfer = transfer
        self._format = FORMATS.get(transfer)
        self._kept: list[str] = []
        self._dtypes: dict[str, str] = {}  # of what is rounded, before it was

    def stored_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which rows are stored that `rounded_rows` will be given."""
        if self._format is None or not _is_wider(dtype):
            return dtype
        self._dtypes[name] = SAFETENSORS_NAMES[dtype]
        return self._format

    def rounded_rows(self, name: str, rows_BY: Tensor) -> Tensor:
        """Return rows (b, y, ...) as they are stored.

        Raises:
            InvalidInputs: the format does not hold one of the numbers.
        """
        if self._format is None or not _is_wider(rows_BY.dtype):
            return rows_BY
        rounded = rows_BY.to(self._format)
        if _overflows(rows_BY, rounded):
            raise InvalidInputs(
                f"transfer: expected rows that {self._transfer} holds, up to "
                f"{torch.finfo(self._format).max:g}, got {_largest(rows_BY):g} in {name!r}; use "
                f"transfer={'exact' if self._transfer == 'bf16' else 'bf16'!r}, or scale the loss"
            )
        self._bound(rows_BY.flatten(0, 1))
        return rounded

    def rounded(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the tensors of a result with the gradients among them rounded."""
        if self._format is None:
            return tensors
        return {name: self._rounded(name, tensor) for name, tensor in tensors.items()}

    def measured(self) -> Measured:
        """Return what was rounded so far, for another process to `add`."""
        return Measured(self.error, dict(self._dtypes), tuple(self._kept))

    def add(self, other: Measured) -> None:
        """Take into account what another process rounded."""
        self.error = max(self.error, other.error)
        self._dtypes |= other.dtypes
        self._kept += other.kept

    def facts(self, *, weights_widened: int) -> dict[str, Any]:
        """Return the fields of the receipt."""
        if self._format is None:
            return {}
        return {
            "transfer": self._transfer,
            "transfer_error": self.error,
            "transfer_kept": self._kept,
            "weights_widened": weights_widened,
        }

    def metadata(self) -> dict[str, str]:
        """Return the entry of the file's metadata from which a reader widens the gradients."""
        return {ROUNDED: json.dumps(self._dtypes, separators=(",", ":"))} if self._dtypes else {}

    def _rounded(self, name: str, gradient: Tensor) -> Tensor:
        assert self._format is not None
        if not name.startswith(SECTIONS) or not _is_wider(gradient.dtype):
            return gradient
        rounded = gradient.detach().to(self._format)
        if _overflows(gradient, rounded):
            self._kept.append(name.partition("/")[2])
            return gradient
        self._dtypes[name] = SAFETENSORS_NAMES[gradient.dtype]
        self._bound(gradient.reshape(1, -1))
        return rounded

    def _bound(self, exact_RP: Tensor) -> None:
        """Take R rows into account."""
        assert self._format is not None
        if not exact_RP.numel():
            return
        unit = torch.finfo(self._format).eps / 2
        if (self._format, exact_RP.dtype) == (torch.bfloat16, torch.float32):  # of one range
            self.error = max(self.error, unit)
            return
        rows = exact_RP.detach().flatten(1)
        norms = torch.linalg.vector_norm(rows, dim=1)
        # Where squares underflow or overflow, the largest number, which is no more than the norm.
        if not bool((norms.isfinite() & (norms > 0)).all()):
            norms = torch.linalg.vector_norm(rows, torch.inf, dim=1)
            norms = norms[norms.isfinite() & (norms > 0)]
        if len(norms):
            lost = torch.finfo(self._format).smallest_normal * unit * rows.shape[1] ** 0.5
            self.error = max(self.error, min(1.0, unit + lost / float(norms.min())))


def widened_weights(
    given: Mapping[str, Tensor], model: nn.Module, *, transfer: Transfer
) -> dict[str, Tensor]:
    """Return the weights that came in 16 bits, in the wider dtypes that the model has them in."""
    if transfer == "exact":
        return {}
    form = FORMATS[transfer]
    registered: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    registered.update(model.named_buffers(remove_duplicate=False))
    return {
        name: tensor.to(registered[name].device).to(registered[name].dtype)
        for name, tensor in given.items()
        if tensor.dtype == form and name in registered and _is_wider(registered[name].dtype)
    }


def _is_wider(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 2


def _overflows(exact: Tensor, rounded: Tensor) -> bool:
    if not rounded.numel() or all(bool(end.isfinite()) for end in rounded.aminmax()):
        return False
    return bool((rounded.isinf() & exact.isfinite()).any())


def _largest(rows: Tensor) -> float:
    return float(rows[rows.isfinite()].abs().max())
