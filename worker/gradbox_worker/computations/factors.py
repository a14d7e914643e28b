"""A factored result as tensors of a file, and the metadata that says what they stand for.

`docs/wire.md`, "Factored arrays", states the form.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from gradbox.errors import InvalidInputs
from gradbox.results.factors import FACTORS, read_factors
from gradbox.results.row_reductions import GRADIENT
from gradbox_factors import Factored, packed
from gradbox_worker.files.earlier_result import earlier_result, receipt_of
from gradbox_worker.work import Work


def stored_rows(work: Work, *, of: str, device: torch.device) -> Factored:
    """Return the rows that job `of` left: factors, or arrays where those are smaller.

    Factors are read to the device when they are used.

    Raises:
        InvalidInputs: its result is not there any more, or damaged.
    """
    file = earlier_result(work)
    if file is None:
        raise InvalidInputs(
            f"against: expected the rows of job {of}, but its result is not on this box any more, "
            f"or damaged on its disk; run that job again"
        )
    receipt = receipt_of(file)
    if FACTORS not in file.metadata:
        arrays = {name: file.tensor(f"grads/{name}").to(device) for name in receipt.names}
        return Factored.of_arrays(arrays, one_output=receipt.computation == GRADIENT)
    return read_factors(
        file.metadata[FACTORS],
        lambda name: file.tensor(name).to(device),
        stored=file.stored,
        names=receipt.names,
        samples=receipt.samples,
        outputs=receipt.outputs,
    )


def described(factors: Factored) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors by their names in the file, each once, and the metadata."""
    tensors, pieces = packed(factors.pieces, prefix="factors/")
    return tensors, {FACTORS: json.dumps({"pieces": pieces}, separators=(",", ":"))}
