"""What a job can be told beyond its loss: penalties, memory, precision, order, what to return."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradbox import Gradient, GradResult, InvalidInputs, Penalty, UntraceableLoss
from gradbox_engine import shard_stream
from tests import case_models
from tests.boxes import TestBox
from tests.cases import CASES
from tests.client import zoo
from tests.oracle import TOLERANCE, difference

WAIT_S = 120.0
DOUBLE = torch.float64


def submitted(box: TestBox, gradient: Gradient) -> GradResult:
    with box.client() as client:
        return client.submit(gradient).result(WAIT_S)


def mean_square(z: Tensor) -> Tensor:
    return z.square().mean()


def shards_of(case: str) -> list[dict[str, Tensor]]:
    return list(CASES[case]().groups["z"])


def test_penalties_add_to_the_loss_and_to_the_gradient(box: TestBox) -> None:
    shards = shards_of("mlp")
    penalty = Penalty(at="0", loss=lambda tap: tap.abs().sum(), weight=0.3)
    result = submitted(
        box, Gradient(model="mlp", inputs=shards, loss=mean_square, penalties=[penalty])
    )
    model = case_models.mlp()
    taps: list[Tensor] = []
    model[0].register_forward_hook(lambda _module, _inputs, output: taps.append(output))
    loss = mean_square(torch.cat([model(shard["0"]) for shard in shards]))
    loss = loss + sum(0.3 * tap.abs().sum() for tap in taps)
    loss.backward()
    assert result.loss == pytest.approx(loss.item(), rel=TOLERANCE)
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert difference(result.grads, expected) <= TOLERANCE


def test_a_per_sample_scale_rescales_the_penalty_alone(box: TestBox) -> None:
    shards = shards_of("mlp")
    given = {"model": "mlp", "inputs": shards, "loss": mean_square}

    def penalised(scale: float) -> GradResult:
        penalty = Penalty(
            at="0",
            loss=lambda tap: tap.square().sum(),
            per_sample_scale=lambda z: scale * torch.ones_like(z[:, 0]),
        )
        return submitted(box, Gradient(**given, penalties=[penalty]))

    plain, once, twice = submitted(box, Gradient(**given)), penalised(1.0), penalised(2.0)
    assert once.loss == twice.loss > plain.loss
    for name in plain.names:
        added = once.grads[name] - plain.grads[name]
        torch.testing.assert_close(twice.grads[name] - plain.grads[name], 2 * added)


def test_what_is_retained_changes_the_receipt_and_no_bit_of_the_gradient(box: TestBox) -> None:
    shards = shards_of("mlp")

    def retained(budget: int) -> GradResult:
        return submitted(
            box,
            Gradient(model="mlp", inputs=shards, loss=mean_square, mode="train", retain=budget),
        )

    none, all_of_them = retained(0), retained(2**30)
    assert none.manifest.shards_replayed == len(shards) - 1  # the last graph is there already
    assert all_of_them.manifest.shards_retained == len(shards)
    assert none.loss == all_of_them.loss
    assert all(torch.equal(none.grads[n], all_of_them.grads[n]) for n in none.names)


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16", "fp64"])
def test_every_precision_is_stated_and_close(box: TestBox, precision: str) -> None:
    shards = [torch.randn(4, 3, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    given = {"model": "tied", "inputs": shards, "loss": mean_square, "mode": "train"}
    exact = submitted(box, Gradient(**given))
    result = submitted(box, Gradient(**given, precision=precision))
    assert result.manifest.precision == precision
    assert result.loss == pytest.approx(exact.loss, rel=0.02)
    assert all(gradient.dtype in (torch.float32, DOUBLE) for gradient in result.grads.values())


def test_order_permutes_the_outputs_before_the_loss_sees_them(box: TestBox) -> None:
    shards = shards_of("mlp")
    outputs = torch.cat([case_models.mlp()(shard["0"]) for shard in shards])
    order = torch.randperm(len(outputs), generator=torch.Generator().manual_seed(0))
    gradient = Gradient(
        model="mlp",
        inputs=shards,
        loss=mean_square,
        order=order,
        returns=("grads", "outputs", "cotangents"),
    )
    result = submitted(box, gradient)
    torch.testing.assert_close(result.outputs["z"], outputs[order].detach())
    torch.testing.assert_close(result.cotangents["z"], 2 * result.outputs["z"] / outputs.numel())


def test_gradients_of_inputs_come_back_shard_by_shard(box: TestBox) -> None:
    shards = shards_of("mlp")
    result = submitted(
        box, Gradient(model="mlp", inputs=shards, loss=mean_square, wrt=["inputs.0", "4.*"])
    )
    model = case_models.mlp()
    leaves = [shard["0"].clone().requires_grad_() for shard in shards]
    mean_square(torch.cat([model(leaf) for leaf in leaves])).backward()
    assert set(result.grads) == {"4.weight", "4.bias"}
    for index, leaf in enumerate(leaves):
        torch.testing.assert_close(result.input_grads[f"z/{index}/0"], leaf.grad)


def test_gradients_of_inputs_without_a_floating_point_one_are_refused(box: TestBox) -> None:
    given = {"model": "transformer", "inputs": [torch.arange(8).reshape(2, 4)], "output": "hidden"}
    with pytest.raises(InvalidInputs, match="returns: expected a floating-point argument"):
        submitted(box, Gradient(**given, loss=mean_square, returns=("grads", "input_grads")))


@pytest.mark.parametrize(
    ("wrt", "selected"),
    [("0", ["0.weight", "0.bias"]), ("[24]", ["2.weight", "2.bias", "4.weight", "4.bias"])],
)
def test_a_module_s_name_stands_for_all_parameters_below_it(
    box: TestBox, wrt: str, selected: list[str]
) -> None:
    model = case_models.mlp()
    expected = [n for n, _ in model.named_parameters() if n in selected]
    given = {"model": "mlp", "inputs": shards_of("mlp"), "loss": mean_square}
    assert list(submitted(box, Gradient(**given, wrt=wrt)).grads) == expected


def test_asking_for_input_gradients_needs_no_wrt(box: TestBox) -> None:
    shards = shards_of("mlp")
    result = submitted(
        box, Gradient(model="mlp", inputs=shards, loss=mean_square, returns=("input_grads",))
    )
    assert len(result.input_grads) == len(shards)
    assert not result.grads


def test_sample_streams_do_not_depend_on_the_cut(box: TestBox) -> None:
    x = torch.randn(12, 5, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))

    def cut(size: int) -> GradResult:
        return submitted(
            box,
            Gradient(
                model="mlp",
                inputs=list(x.split(size)),
                loss=mean_square,
                mode="train",
                streams="sample",
            ),
        )

    coarse, fine = cut(6), cut(2)
    assert difference(fine.grads, dict(coarse.grads)) <= 1e-6


def test_one_group_may_go_by_any_name(box: TestBox) -> None:
    shards = shards_of("mlp")
    named = submitted(box, Gradient(model="mlp", inputs={"texts": shards}, loss=mean_square))
    plain = submitted(box, Gradient(model="mlp", inputs=shards, loss=mean_square))
    assert named.loss == plain.loss


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"penalties": [Penalty(at="nowhere", loss=lambda tap: tap.sum())]}, "nowhere"),
        ({"order": torch.zeros(3, dtype=torch.int64)}, "order"),
        ({"order": {"elsewhere": torch.arange(3)}}, "elsewhere"),
        ({"wrt": ["inputs.nothing"]}, "inputs.nothing"),
    ],
)
def test_terms_that_do_not_fit_are_refused(
    box: TestBox, given: dict[str, object], says: str
) -> None:
    with pytest.raises(InvalidInputs, match=says):
        submitted(
            box,
            Gradient(model="mlp", inputs=shards_of("mlp"), loss=mean_square, **given),
        )


def test_a_penalty_with_parameters_of_its_own_is_refused(box: TestBox) -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0, dtype=DOUBLE))

        def forward(self, tap: Tensor) -> Tensor:
            return (self.scale * tap).sum()

    with pytest.raises(InvalidInputs, match="held constant"):
        submitted(
            box,
            Gradient(
                model="mlp",
                inputs=shards_of("mlp"),
                loss=mean_square,
                penalties=[Penalty(at="0", loss=Learned())],
            ),
        )


def test_an_untraceable_penalty_names_itself(box: TestBox) -> None:
    penalty = Penalty(at="0", loss=lambda tap: tap.sum().item())
    with pytest.raises(UntraceableLoss):
        submitted(
            box,
            Gradient(model="mlp", inputs=shards_of("mlp"), loss=mean_square, penalties=[penalty]),
        )


def test_the_naive_reference_draws_the_masks_that_the_box_draws(box: TestBox) -> None:
    shards = shards_of("mlp")
    result = submitted(
        box,
        Gradient(model="mlp", inputs=shards, loss=mean_square, mode="train", returns=("outputs",)),
    )
    model = case_models.mlp().train()
    for index, shard in enumerate(shards):
        with shard_stream(0, group=0, shard=index):
            z = model(shard["0"])
        size = len(z)
        start = sum(len(shards[i]["0"]) for i in range(index))
        torch.testing.assert_close(result.outputs["z"][start : start + size], z.detach())


def test_gradients_of_inputs_through_a_model_without_parameters(box: TestBox) -> None:
    x = torch.linspace(-1, 1, 12, dtype=DOUBLE).reshape(4, 3)
    expected, leaf = (x.clone().requires_grad_() for _ in range(2))
    mean_square(zoo.without_parameters()(expected)).backward()
    given = {"model": "without_parameters", "inputs": list(x.split(2)), "loss": mean_square}
    result = submitted(box, Gradient(**given, returns=("grads", "input_grads")))
    found = torch.cat([result.input_grads[f"z/{shard}/0"] for shard in range(2)])
    torch.testing.assert_close(found, expected.grad)
    with box.client() as client:
        mean_square(client.model("without_parameters")(leaf)).backward()
    torch.testing.assert_close(leaf.grad, expected.grad)
