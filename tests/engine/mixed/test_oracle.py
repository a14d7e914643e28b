"""Mixed gradients against double backward on the whole table, and the comparison against itself."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from gradbox_engine import Group, NoTangent, Objective, mixed_gradient
from tests import mixed_models as models
from tests.device import DEVICE
from tests.engine.mixed.running import mixed_answer
from tests.mixed_cases import (
    MIXED_CASES,
    OBSTACLES,
    TOLERANCE,
    MixedCase,
    bilinear,
    cubic,
    double_backward,
)
from tests.oracle import difference

ALL = MIXED_CASES | OBSTACLES


@pytest.mark.parametrize("name", ALL)
def test_the_gradient_is_that_of_double_backward(name):
    expected = double_backward(ALL[name]())
    result = mixed_answer(ALL[name]())
    assert difference(result.grads, expected.grads) <= TOLERANCE
    assert result.value == pytest.approx(expected.value, rel=TOLERANCE)
    torch.testing.assert_close(result.dfdz, expected.dfdz, rtol=TOLERANCE, atol=TOLERANCE)
    assert result.replay_difference <= TOLERANCE


@pytest.mark.parametrize("name", MIXED_CASES)
def test_forward_mode_passes_every_operation(name):
    assert mixed_answer(MIXED_CASES[name]()).fallbacks == {}


@pytest.mark.parametrize("model", [models.transposed_norm, models.vectorised])
def test_forward_mode_passes_what_torchs_own_rules_do_not(model):
    case = replace(MIXED_CASES["checkpoints"](), model=model)
    result = mixed_answer(case)
    assert result.fallbacks == {}
    assert difference(result.grads, double_backward(case).grads) <= TOLERANCE


def test_forward_mode_passes_samples_of_images():
    case = replace(MIXED_CASES["checkpoints"](), model=models.sampled)
    result = mixed_answer(case)
    assert result.fallbacks == {}
    by_matrix = replace(case, model=partial(models.sampled, by_matrix=True))
    assert difference(result.grads, double_backward(by_matrix).grads) <= TOLERANCE


def test_a_model_that_rounds_on_its_way_is_compared_with_that_rounding():
    case = replace(MIXED_CASES["checkpoints"](), model=models.rounded)
    result = mixed_answer(case)
    assert result.fallbacks == {}
    assert difference(result.grads, double_backward(case).grads) <= 1e-5


def _implicit(**given: bool) -> MixedCase:
    return replace(
        MIXED_CASES["checkpoints"](), model=lambda: models.implicit(**given), mode="eval"
    )


def _by_differences(case: MixedCase) -> Tensor:
    """Return dt/dy by central differences."""
    y, size = case.y["y"], 1e-5
    values = []
    for step in size * torch.eye(y.numel(), dtype=y.dtype):
        ends = [{"y": (y + way * step.view_as(y)).detach()} for way in (1, -1)]
        above, below = (mixed_answer(replace(case, y=end)).value for end in ends)
        values.append((above - below) / (2 * size))
    return torch.tensor(values, dtype=y.dtype).view_as(y)


def test_an_implicit_layer_has_the_gradient_that_double_backward_misses():
    case = _implicit(solved_apart=False)
    expected = _by_differences(case)
    result = mixed_answer(case)
    assert result.fallbacks == {}
    torch.testing.assert_close(result.grads["y.y"], expected, rtol=1e-6, atol=1e-6)
    assert (double_backward(case).grads["y.y"] - expected).norm() > 1e-3 * expected.norm()


def test_a_hook_that_loses_the_second_derivative_is_refused():
    with pytest.raises(NoTangent, match="let a hook pass create_graph=True"):
        mixed_answer(_implicit(solved_apart=True))


def test_a_hook_that_records_its_backward_passes_is_followed():
    case = _implicit(solved_apart=True, recorded=True)
    result = mixed_answer(case)
    assert sum(result.fallbacks.values()) == result.shards["z"]
    torch.testing.assert_close(result.grads["y.y"], _by_differences(case), rtol=1e-6, atol=1e-6)


def test_gradients_that_a_hook_clips_are_followed_as_they_are():
    case = replace(_implicit(solved_apart=False), model=models.clipped)
    result = mixed_answer(case)
    assert list(result.fallbacks) == ["forward mode that disagrees with reverse mode"]
    assert difference(result.grads, double_backward(case).grads) <= TOLERANCE


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_what_forward_mode_cannot_pass_is_named_and_gone_round(obstacle):
    result = mixed_answer(OBSTACLES[obstacle]())
    assert result.fallbacks == {obstacle: result.shards["z"]}


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (models.distances, "_cdist_backward"),
        # autograd itself returns zeros here, without a word.
        (models.once_differentiable, "once_differentiable"),
    ],
)
def test_an_operation_without_any_second_derivative_is_refused(model, reason):
    case = replace(OBSTACLES["a custom autograd.Function"](), model=model)
    with pytest.raises(NoTangent, match=rf"(?s){reason}.*give a custom autograd.Function a jvp"):
        mixed_answer(case)


def test_memory_that_a_second_backward_pass_lacks_is_told_as_that():
    case = replace(OBSTACLES["a custom autograd.Function"](), model=models.short_of_memory)
    with pytest.raises(torch.OutOfMemoryError, match="shard 0: the second backward pass"):
        mixed_answer(case)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_reentrant_checkpoints_change_nothing(mode):
    case = replace(MIXED_CASES["checkpoints"](), mode=mode)
    reentrant = replace(case, model=lambda: models.checkpointed(reentrant=True))
    result = mixed_answer(reentrant)
    assert result.fallbacks == {}
    assert difference(result.grads, double_backward(case).grads) <= TOLERANCE


def _y_alone(dfdz: Tensor, y: Tensor) -> Tensor:
    return y.square().sum()


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        (lambda y, v: y.sum(), lambda dfdz, y: dfdz.sum() + _y_alone(dfdz, y)),
        (lambda y, v: v.sum(), lambda dfdz, y: dfdz.sum() + _y_alone(dfdz, y)),
        (cubic, _y_alone),
    ],
    ids=["inner without v", "inner without y", "outer without dfdz"],
)
@pytest.mark.parametrize("name", ["mlp, cubic", "a custom autograd.Function"])
def test_where_no_path_leads_through_the_model_y_counts_alone(name, inner, outer):
    case = replace(ALL[name](), inner=inner, outer=outer, outer_reads=("y",))
    result = mixed_answer(case)
    torch.testing.assert_close(result.grads["y.y"], 2 * case.y["y"].detach().to(DEVICE))


def test_y_may_be_in_outer_alone():
    case, y = MIXED_CASES["mlp, cubic"](), torch.ones(3, dtype=torch.float64, requires_grad=True)
    result = mixed_gradient(
        case.model().to(DEVICE),
        Group("z", case.shards),
        Objective(lambda v: v.pow(3).sum()),
        Objective(lambda dfdz, y: (dfdz.sum() * y).sum(), {"y": y}, {"y": y}),
        returns=("dfdz",),
    )
    torch.testing.assert_close(result.grads["y"], result.dfdz.sum().expand(3))


@pytest.mark.parametrize("name", ["mlp, cubic", "a custom autograd.Function"])
def test_outputs_that_z_does_not_reach_are_constants(name):
    plain = ALL[name]()

    def halved(v: Tensor, _inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"v": v, "half": torch.full_like(v.detach(), 0.5), "unread": v.sin()}

    case = replace(
        plain, readout=halved, inner=lambda y, v: plain.inner(y, v["v"]) * v["half"].mean()
    )
    expected = double_backward(replace(plain, inner=lambda y, v: plain.inner(y, v) * 0.5))
    assert difference(mixed_answer(case).grads, expected.grads) <= TOLERANCE


def test_leaves_that_nothing_reaches_are_named_and_zero():
    result = mixed_answer(MIXED_CASES["generator under a critic"]())
    # The bias shifts inner by a constant: dfdz does not depend on it.
    assert set(result.unreached) == {"inner.unused", "inner.head.bias"}
    assert not result.grads["inner.unused"].any()
    assert result.grads["inner.conv.weight"].any()


@pytest.mark.parametrize("wrong", ["scaled", "a shard less", "another mask", "another inner"])
def test_the_comparison_sees_a_wrong_answer(wrong):
    case = MIXED_CASES["mlp, cubic"]()
    expected = double_backward(case).grads
    grads = {
        "scaled": lambda: {n: g * 1.001 for n, g in expected.items()},
        "a shard less": lambda: mixed_answer(replace(case, shards=case.shards[:-1])).grads,
        "another mask": lambda: mixed_answer(replace(case, seed=case.seed + 1)).grads,
        "another inner": lambda: mixed_answer(replace(case, inner=bilinear)).grads,
    }[wrong]()
    assert difference(grads, expected) > 1e3 * TOLERANCE
