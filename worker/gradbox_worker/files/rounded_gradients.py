"""Gradients in 16 bits on their way into a result file: rounded to nearest, the rounding measured.

    error = max over gradients g of ‖round(g) − g‖ / ‖g‖,    in float64

where g is one gradient, or one sample's row of a parameter. A row that is written in parts counts
by its parts, of which none is better than the row. Norms, for the error of a single number says
nothing in fp16: whatever is below 3e-8 becomes zero.

A float64 is rounded to float32 first, as torch does it: of two 16-bit neighbours it may get the one
that is farther off by 2^-24 of it.

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
from gradbox.protocol.options import Transfer
from gradbox.results.rounded_tensors import ROUNDED
from gradbox_worker.files.safetensors_types import SAFETENSORS_NAMES

FORMATS: Final[Mapping[Transfer, torch.dtype]] = {"bf16": torch.bfloat16, "fp16": torch.float16}
SECTIONS: Final = ("grads/", "input_grads/")
# Measured so many numbers at a time, for they are widened to float64.
BLOCK: Final = 2**22


@dataclass(frozen=True)
class Measured:
    """What rounding did in another process.

    Attributes:
        error: the largest so far.
        dtypes: what the gradients had before.
        kept: names of those that stayed in their own.
    """

    error: float
    dtypes: Mapping[str, str]
    kept: tuple[str, ...] = ()


class RoundedGradients:
    """The format of one job's gradients; "exact" leaves all as it is.

    Attributes:
        error: the largest relative error of the rounding so far.
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
        self._measure(rows_BY.flatten(0, 1), rounded.flatten(0, 1))
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
        # One on `meta` was rounded by the process that wrote it.
        if gradient.is_meta or not name.startswith(SECTIONS) or not _is_wider(gradient.dtype):
            return gradient
        rounded = gradient.detach().to(self._format)
        if _overflows(gradient, rounded):
            self._kept.append(name.partition("/")[2])
            return gradient
        self._dtypes[name] = SAFETENSORS_NAMES[gradient.dtype]
        self._measure(gradient.reshape(1, -1), rounded.reshape(1, -1))
        return rounded

    def _measure(self, exact_RP: Tensor, rounded_RP: Tensor) -> None:
        """Take R rows into account."""
        if exact_RP.device.type == "mps":  # which has no float64
            exact_RP, rounded_RP = exact_RP.cpu(), rounded_RP.cpu()
        flat = exact_RP.flatten(1), rounded_RP.flatten(1)
        if not flat[0].numel():
            return
        # Squares of what is divided by the largest do not underflow.
        largest = torch.linalg.vector_norm(flat[0].detach(), torch.inf, 1, keepdim=True).double()
        missed = exact_RP.new_zeros(len(exact_RP), device="cpu", dtype=torch.float64)
        whole = missed.clone()
        step = max(1, BLOCK // max(1, len(exact_RP)))
        for first in range(0, flat[0].shape[1], step):
            wide = flat[0][:, first : first + step].detach().double()
            missing = wide - flat[1][:, first : first + step].double()
            whole += (wide / largest).square_().sum(1).cpu()
            missed += missing.div_(largest).square_().sum(1).cpu()
        shares = (missed / whole)[whole.isfinite() & (whole > 0)]
        if len(shares):
            self.error = max(self.error, float(shares.max().sqrt()))


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
    infinite = rounded.isinf()
    return bool(infinite.any()) and bool((infinite & exact.isfinite()).any())


def _largest(rows: Tensor) -> float:
    return float(rows[rows.isfinite()].abs().max())
