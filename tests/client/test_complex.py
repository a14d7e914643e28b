"""Models with complex outputs and complex parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gradbox import Gradient, InvalidInputs
from tests.boxes import TestBox
from tests.client import zoo
from tests.oracle import difference

WAIT_S = 120.0
SHARDS = list(torch.linspace(-1, 1, 15).reshape(5, 3).split(3))


def as_parts(output: Any, inputs: Any) -> Tensor:
    return torch.view_as_real(output)


def power(z: Tensor) -> Tensor:
    return (torch.view_as_complex(z) + 1j).abs().pow(3).mean()


def test_a_complex_output_is_refused_with_the_readout_that_serves(twin: TestBox) -> None:
    job = Gradient(model="spectrum", inputs=SHARDS, loss=lambda z: z.abs().mean())
    with (
        twin.client() as client,
        pytest.raises(InvalidInputs, match=r"torch\.view_as_real\(output\)"),
    ):
        client.submit(job).result(WAIT_S)


def test_its_real_form_has_the_gradients_of_naive_code(twin: TestBox) -> None:
    model = zoo.spectrum()
    power(torch.view_as_real(model(torch.cat(SHARDS)))).backward()
    job = Gradient(model="spectrum", inputs=SHARDS, loss=power, readout=as_parts)
    found = twin.result_of(job).grads
    assert found["turn"].dtype is torch.complex64
    assert difference(found, {name: p.grad for name, p in model.named_parameters()}) < 1e-5


@pytest.mark.parametrize(
    ("model", "given"), [("wide_spectrum", {}), ("spectrum", {"precision": "fp64"})]
)
def test_gradients_that_no_result_holds_are_refused_when_posted(
    twin: TestBox, model: str, given: dict[str, Any]
) -> None:
    shared = {"model": model, "inputs": SHARDS, "loss": power, "readout": as_parts, **given}
    with twin.client() as client:
        with pytest.raises(InvalidInputs, match=r"got those of \['turn'\], which are complex128"):
            client.submit(Gradient(**shared))
        found = client.submit(Gradient(**shared, wrt="before")).result(WAIT_S)
    assert set(found.grads) == {"before.weight", "before.bias"}
