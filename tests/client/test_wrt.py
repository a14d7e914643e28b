"""What `wrt` selects where names look like patterns, like inputs, or like parts of the loss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradbox import Gradient, InvalidInputs, PerSampleGradient
from tests.boxes import TestBox
from tests.client import zoo
from tests.oracle import TOLERANCE, difference

X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
SHARDS = [{"x": X[:3], "y": X[:3] / 2}, {"x": X[3:], "y": X[3:] / 2}]


class Scaled(nn.Module):
    """A loss with a parameter, which comes back as `loss.scale`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, z: Tensor) -> Tensor:
        return self.scale * z.square().mean()


def weights(*modules: str) -> set[str]:
    return {f"{name}.weight" for name in modules}


@pytest.mark.parametrize(
    ("wrt", "parameters", "inputs"),
    [
        ("N[C]*?.weight", weights("N[C]*?"), ""),
        ("N[C]*?", weights("N[C]*?"), ""),
        ("inputs.*", weights("inputs"), "xy"),
        ("inputs.weight", weights("inputs"), ""),
        ("inputs", weights("inputs"), ""),
        ("inputs.x", set(), "x"),
        ("loss.*", weights("loss"), ""),
        ("loss_inputs.*", weights("loss_inputs"), ""),
    ],
)
def test_an_odd_name_selects_what_is_called_so(
    twin: TestBox, wrt: str, parameters: set[str], inputs: str
) -> None:
    model = zoo.oddly_named()
    loss = Scaled()
    whole = {n: torch.cat([shard[n] for shard in SHARDS]).requires_grad_() for n in "xy"}
    loss(model(**whole)).backward()
    job = Gradient(model="oddly_named", inputs=SHARDS, loss=loss, wrt=wrt)
    found = twin.result_of(job)
    expected = {name: p.grad for name, p in model.named_parameters() if name in parameters}
    expected |= {"loss.scale": loss.scale.grad}
    assert difference(found.grads, expected) <= TOLERANCE
    shards = {name: whole[name].grad.split([3, 1]) for name in inputs}
    slices = {f"z/{i}/{name}": part for name in inputs for i, part in enumerate(shards[name])}
    assert difference(found.input_grads, slices) <= TOLERANCE if inputs else not found.input_grads


@pytest.mark.parametrize("wrt", ["loss.*", "inputs.weight"])
def test_all_inputs_asked_for_by_returns_are_no_parameters(twin: TestBox, wrt: str) -> None:
    job = Gradient(
        model="oddly_named",
        inputs=SHARDS,
        loss=lambda z: z.square().mean(),
        wrt=wrt,
        returns=("grads", "input_grads"),
    )
    found = twin.result_of(job)
    assert set(found.grads) == weights(wrt.partition(".")[0])
    assert set(found.input_grads) == {f"z/{i}/{name}" for i in range(2) for name in "xy"}


def test_rows_are_those_of_the_module_called_inputs(twin: TestBox) -> None:
    job = PerSampleGradient(
        model="oddly_named", inputs=SHARDS, loss=lambda z: z.square().mean(1), wrt="inputs.*"
    )
    assert set(twin.result_of(job).grads) == weights("inputs")


def test_a_name_that_the_loss_has_too_is_refused(twin: TestBox) -> None:
    loss = nn.Sequential()
    loss.weight = nn.Parameter(torch.ones((), dtype=torch.float64))
    loss.forward = lambda z: loss.weight * z.mean()
    job = Gradient(model="oddly_named", inputs=SHARDS, loss=loss, wrt="loss.*")
    with pytest.raises(InvalidInputs, match=r"got \['loss.weight'\]; name them otherwise"):
        twin.result_of(job)
