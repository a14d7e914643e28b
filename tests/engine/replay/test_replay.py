"""What the replay leaves out, in which order things come, and the phases one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import BadInputs, Group, Objective, SetGradient, set_gradient, shard_stream
from tests import case_models
from tests.cases import CASES
from tests.device import same_bits
from tests.engine.per_sample.zoo import Written
from tests.engine.replay.running import answer
from tests.oracle import TOLERANCE, difference, naive


class _Recording(nn.Module):
    """Notes which shard comes, by the first entry of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2).double()
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.flatten()[0].item())
        return self.linear(x)


def _numbered(num_shards: int) -> list[dict[str, Tensor]]:
    return [{"0": torch.full((2, 2), float(i), dtype=torch.float64)} for i in range(num_shards)]


def _seen(loss, num_shards: int = 4) -> tuple[list[float], tuple[str, ...]]:
    model = _Recording()
    seen = model.seen  # the job puts the list back, as it does every attribute
    order: list[float] = []
    model.register_forward_hook(lambda *_: order.append(seen[-1]))
    result = set_gradient(model, [Group("z", _numbered(num_shards))], Objective(loss))
    return order, result.unreached


def test_the_last_shard_is_not_run_again():
    order, _ = _seen(lambda z: z.square().sum())
    assert order == [0, 1, 2, 3, 0, 1, 2]


def test_shards_with_a_cotangent_of_zero_are_not_replayed():
    order, unreached = _seen(lambda z: z[2:4].sum())
    assert order == [0, 1, 2, 3, 1]
    assert unreached == ()


def test_a_loss_flat_in_z_reaches_the_parameters_all_the_same():
    order, unreached = _seen(lambda z: (z * 0).sum())
    assert order == [0, 1, 2, 3]
    assert unreached == ()


def test_a_loss_that_reads_its_own_parameters_alone_reaches_none_of_the_models():
    scale = torch.ones(())
    objective = Objective(lambda z: scale * z.detach().sum(), parameters={"loss.scale": scale})
    result = set_gradient(_Recording(), [Group("z", _numbered(2))], objective)
    assert result.unreached == ("linear.weight", "linear.bias")
    assert result.grads["loss.scale"] == result.loss


@pytest.mark.parametrize(
    "loss", [lambda z: torch.ones(()), lambda z: z.detach().sum(), lambda z: z.argmax().double()]
)
def test_a_loss_without_a_derivative_is_refused_as_backward_refuses_it(loss):
    with pytest.raises(BadInputs, match="loss: expected numbers that can be differentiated"):
        _seen(loss)


def test_a_group_that_the_loss_does_not_read_is_not_replayed():
    case = CASES["two towers"]()
    groups = [
        Group(name, shards, method=case.methods[name]) for name, shards in case.groups.items()
    ]
    objective = Objective(lambda images, texts: texts.square().mean())
    returns = ("grads", "cotangents")
    result = set_gradient(case.model(), groups, objective, mode="train", returns=returns)
    assert set(result.unreached) == {"images.0.weight", "images.0.bias"}
    assert (result.retained, result.replayed) == (1, 1)
    assert all(bool(result.grads[name].eq(0).all()) for name in result.unreached)
    assert not result.cotangents["images"].any()


def _towers(loss) -> SetGradient:
    case = CASES["two towers"]()
    groups = [
        Group(name, shards, method=case.methods[name]) for name, shards in case.groups.items()
    ]
    return set_gradient(case.model(), groups, Objective(loss))


def test_a_group_in_which_the_loss_is_flat_is_reached_all_the_same():
    result = _towers(lambda images, texts: texts.square().mean() + images.sum() * 0)
    assert result.unreached == ()
    assert not result.grads["images.0.weight"].any()


def test_a_loss_takes_groups_by_name():
    one = _towers(lambda images, texts: images.square().sum() + texts.exp().sum())
    other = _towers(lambda texts, images: images.square().sum() + texts.exp().sum())
    assert all(same_bits(other.grads[name], gradient) for name, gradient in one.grads.items())


def test_a_loss_that_draws_numbers_has_a_stream_of_its_own():
    case = CASES["mlp"]()
    groups, seen = [Group("z", case.groups["z"])], []

    def loss(z: Tensor) -> Tensor:
        seen.append(torch.rand_like(z))
        return (z * seen[-1]).sum()

    set_gradient(case.model(), groups, Objective(loss), seed=4)
    with shard_stream(4, 1, 0):
        assert torch.equal(torch.rand_like(seen[0]), seen[0])


def test_nothing_comes_back_that_was_not_asked_for():
    case = CASES["mlp"]()
    result = set_gradient(case.model(), [Group("z", case.groups["z"])], Objective(torch.var))
    assert result.buffers is result.outputs is result.cotangents is result.input_grads is None


def test_parameters_of_the_loss_that_it_does_not_use_are_zeros_and_named():
    unused = torch.ones(2, requires_grad=True)
    case = CASES["mlp"]()
    objective = Objective(torch.var, parameters={"loss.unused": unused})
    result = set_gradient(case.model(), [Group("z", case.groups["z"])], objective)
    assert result.unreached == ("loss.unused",)
    assert result.grads["loss.unused"].tolist() == [0, 0]


def test_leaves_among_the_loss_inputs_get_gradients():
    weights = torch.rand(14, dtype=torch.float64, requires_grad=True)
    case = CASES["mlp"]()
    result = set_gradient(
        case.model(),
        [Group("z", case.groups["z"])],
        Objective(
            lambda z, weights: (z.sum(1) * weights).sum(),
            {"weights": weights},
            {"loss_inputs.weights": weights},
        ),
        returns=("grads", "outputs"),
    )
    assert torch.equal(result.grads["loss_inputs.weights"], result.outputs["z"].sum(1))
    assert weights.grad is None


def test_order_puts_z_back_before_the_loss():
    case = CASES["mlp, labels"]()
    order = torch.randperm(14, generator=torch.Generator().manual_seed(1))
    packed = torch.empty(14, 5, dtype=torch.float64)
    packed[order] = torch.cat([shard["0"] for shard in case.groups["z"]])
    shards = [{"0": rows} for rows in packed.split(5)]
    result = set_gradient(
        case.model(),
        [Group("z", shards, order=order)],
        Objective(case.loss, case.loss_inputs),
        returns=("outputs", "cotangents"),
    )
    expected = naive(case)
    assert difference(result.grads, expected.grads) <= TOLERANCE
    torch.testing.assert_close(result.outputs["z"], expected.outputs["z"].detach())
    z = expected.outputs["z"].detach().requires_grad_()
    (cotangent,) = torch.autograd.grad(case.loss(z, **case.loss_inputs), z)
    torch.testing.assert_close(result.cotangents["z"], cotangent)


def test_a_view_of_a_large_activation_does_not_keep_it():
    held = []

    result = set_gradient(
        Written(lambda m, x: m.linear(x)[:, 0], linear=nn.Linear(4, 4)),
        [Group("z", [{"x": torch.ones(2, 50, 4)}] * 3)],
        Objective(torch.sum),
        returns=("outputs",),
    )
    held.append(result.outputs["z"])
    assert held[0].untyped_storage().nbytes() == held[0].nbytes


def test_sequences_are_read_shard_by_shard():
    reads: list[int] = []
    shards = _numbered(3)

    class Lazy:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            reads.append(index)
            return shards[index]

    set_gradient(_Recording(), [Group("z", Lazy())], Objective(torch.var))
    assert reads == [0, 1, 2, 0, 1]


def test_tied_weights_may_be_asked_for_by_either_name():
    case = CASES["transformer, tied logits"]()
    result = answer(case, wrt=["out.weight"])
    assert difference(result.grads, {"embedding.weight": naive(case).grads["embedding.weight"]}) < (
        TOLERANCE
    )


def test_a_model_without_parameters_gives_outputs():
    result = set_gradient(
        nn.Flatten(), [Group("z", _numbered(2))], Objective(torch.sum), returns=("outputs",)
    )
    assert result.grads == {}
    assert result.loss == 4


def test_frozen_parts_are_not_differentiated():
    model = case_models.frozen()
    stems: list[bool] = []
    model.stem.register_forward_hook(lambda _module, _inputs, out: stems.append(out.requires_grad))
    answer(CASES["frozen stem"](), model)
    assert not any(stems)
