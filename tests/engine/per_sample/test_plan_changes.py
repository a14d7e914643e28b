"""What an earlier job has checked confirms nothing for another loss, other weights or data."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradbox_engine.per_sample import CoupledSamples, SampleResult, jacobian, per_sample_gradient
from tests.engine.per_sample import naive
from tests.engine.per_sample.zoo import Square, Written


def _squares(z: Tensor) -> Tensor:
    return z.square().sum(1)


def _x(*sizes: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"0": torch.randn(*sizes, dtype=torch.float64)}


def _difference(model: nn.Module, inputs: dict[str, Tensor], result: SampleResult) -> float:
    losses = _squares(naive.outputs(model, inputs))[:, None]
    expected = naive.flat(naive.rows(losses, dict(model.named_parameters())))[:, 0]
    return naive.difference(naive.flat(result.arrays, lead=1), expected)


def test_a_second_loss_that_mixes_samples_is_refused() -> None:
    model = nn.Linear(4, 2).double()
    per_sample_gradient(model, [_x(6, 4)], _squares)
    with pytest.raises(CoupledSamples, match="loss"):
        per_sample_gradient(model, [_x(6, 4)], lambda z: (z - z.mean(0)).square().sum(1))


def test_a_flat_loss_does_not_pass_for_one_that_keeps_samples_apart() -> None:
    def loss(z: Tensor, far: Tensor) -> Tensor:
        return F.relu(z - z.mean(0) - far).sum(1)

    far = torch.tensor([1e3] * 3 + [-1e3] * 3, dtype=torch.float64)[:, None]
    model, x = nn.Linear(4, 2).double(), _x(6, 4)["0"]
    shards = [{"0": x[:3]}, {"0": x[3:]}]
    with pytest.raises(CoupledSamples, match="loss"):
        per_sample_gradient(model, shards, loss, loss_inputs={"far": far})


@pytest.mark.parametrize("gate", ["head", "branch"])
def test_batch_norm_behind_a_weight_of_zero_is_refused_once_it_is_not(gate: str) -> None:
    parts = {"a": nn.Linear(5, 5), "n": nn.BatchNorm1d(5), "b": nn.Linear(5, 3)}
    if gate == "head":
        model = Written(lambda m, x: m.b(m.n(m.a(x)).tanh()), **parts).double()
        weights = {"b.weight": torch.randn(3, 5, dtype=torch.float64)}
        nn.init.zeros_(model.get_parameter("b.weight"))
    else:
        model = Written(lambda m, x: m.b(x + m.n(m.a(x))), **parts).double()
        weights = {"n.weight": torch.ones(5, dtype=torch.float64)}
        nn.init.zeros_(model.get_parameter("n.weight"))
    per_sample_gradient(model, [_x(8, 5)], _squares, mode="train")
    with pytest.raises(CoupledSamples, match="'n'"):
        per_sample_gradient(model, [_x(8, 5)], _squares, mode="train", weights=weights)


def _gated_batch_statistics(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x)  # type: ignore[operator]
    return h + m.gate * (h.argmax(0) * h.detach().mean(0))  # type: ignore[no-any-return]


@pytest.mark.parametrize("samples", [2, 8])
def test_a_coupling_that_data_bring_in_is_refused_by_the_module_s_name(samples: int) -> None:
    """Under a plan that an earlier job made; no parameter tells."""

    def forward(m: nn.Module, x: Tensor, share: Tensor) -> Tensor:
        h = m.n(m.a(x))  # type: ignore[operator]
        return m.b(x + share * h)  # type: ignore[operator,no-any-return]

    parts = {"a": nn.Linear(5, 5), "n": nn.BatchNorm1d(5), "b": nn.Linear(5, 3)}
    model, x = Written(forward, **parts).double(), _x(samples, 5)["0"]
    share = torch.zeros(samples, 1, dtype=torch.float64)
    per_sample_gradient(model, [{"x": x, "share": share}], _squares, mode="train")
    for seed in range(3):
        with pytest.raises(CoupledSamples, match="'n'"):
            per_sample_gradient(
                model, [{"x": x, "share": share + 1}], _squares, mode="train", seed=seed
            )


def test_a_loss_that_mixes_samples_on_a_later_shard_alone_is_refused() -> None:
    def loss(z: Tensor, share: Tensor) -> Tensor:
        return (z - share * z.mean(0)).square().sum(1)

    share = torch.tensor([0.0] * 3 + [1.0] * 3, dtype=torch.float64)[:, None]
    model, x = nn.Linear(4, 2).double(), _x(6, 4)["0"]
    shards = [{"0": x[:3]}, {"0": x[3:]}]
    with pytest.raises(CoupledSamples, match="loss"):
        per_sample_gradient(model, shards, loss, loss_inputs={"share": share})


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_coupling_without_a_gradient_is_refused_once_its_gate_is_not_zero(
    precision: str, kind: str
) -> None:
    """What is multiplied by the gate mixes samples, and leaves all rows autograd's."""
    torch.manual_seed(1)
    model = Written(_gated_batch_statistics, a=nn.Linear(5, 3))
    if kind == "parameter":
        model.gate = nn.Parameter(torch.zeros(3))
    else:
        model.register_buffer("gate", torch.zeros(3))
    inputs = {"0": torch.randn(8, 5)}
    per_sample_gradient(model, [inputs], _squares, precision=precision, wrt=["a.*"])
    with pytest.raises(CoupledSamples, match="one sample"):
        per_sample_gradient(
            model,
            [inputs],
            _squares,
            precision=precision,
            wrt=["a.*"],
            weights={"gate": torch.ones(3)},
        )


def test_a_loop_is_not_kept_where_no_sample_could_be_replaced() -> None:
    def forward(m: nn.Module, ids: Tensor) -> Tensor:
        h = m.table(ids).flatten(0, 1)  # type: ignore[operator]
        h = m.pairs(h, h).view(len(ids), -1)  # type: ignore[operator]
        return h[ids[:, 0].argsort(stable=True).argsort()]  # type: ignore[no-any-return]

    model = Written(forward, table=nn.Embedding(7, 4), pairs=nn.Bilinear(4, 4, 2)).double()
    ids = torch.zeros(6, 3, dtype=torch.long)
    assert "pairs.weight" in jacobian(model, [{"0": ids}]).loops
    ids[:, 1:] = torch.arange(6)[:, None]
    assert "pairs.weight" not in jacobian(model, [{"0": ids}]).loops


def test_an_order_that_changes_among_small_samples_is_seen_beside_a_large_one() -> None:
    """One row is 1e12 times as large as those that a permutation exchanges."""

    def forward(m: nn.Module, x: Tensor, order: Tensor) -> Tensor:
        P = F.one_hot(order, len(order)).to(x)
        return P.T @ m.b(P @ m.a(x).tanh())  # type: ignore[operator,no-any-return]

    torch.manual_seed(1)
    model = Written(forward, a=nn.Linear(5, 4), b=nn.Linear(4, 3)).double()
    scale = torch.tensor([1e12] + [1.0] * 5, dtype=torch.float64)
    x = torch.randn(6, 5, dtype=torch.float64)

    def loss(z: Tensor, scale: Tensor) -> Tensor:
        return z.square().sum(1) * scale

    def rows(order: Tensor) -> tuple[Tensor, Tensor]:
        losses = loss(model(x, order), scale)[:, None]
        expected = naive.flat(naive.rows(losses, dict(model.named_parameters())))[:, 0]
        found = per_sample_gradient(
            model,
            [{"x": x, "order": order}],
            loss,
            loss_inputs={"scale": scale},
            unchecked=["coupling"],
        )
        return naive.flat(found.arrays, lead=1), expected

    for order in ([0, 1, 2, 3, 4, 5], [0, 2, 1, 3, 5, 4]):
        found, expected = rows(torch.tensor(order))
        for row, of_autograd in zip(found, expected, strict=True):
            assert naive.difference(row, of_autograd) <= naive.TOLERANCE


def test_rows_of_zero_are_compared_again_when_they_are_not() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m.b(Square.apply(x, m.w)).tanh()  # type: ignore[operator,no-any-return,no-untyped-call]

    torch.manual_seed(1)
    model = Written(forward, w=nn.Parameter(torch.randn(5)), b=nn.Linear(5, 3)).double()
    weights = {"b.weight": model.get_parameter("b.weight").detach().clone()}
    nn.init.zeros_(model.get_parameter("b.weight"))
    first = per_sample_gradient(model, [_x(6, 5)], _squares)
    assert not first.arrays["w"].any()
    second = per_sample_gradient(model, [_x(6, 5)], _squares, weights=weights)
    model.load_state_dict({**model.state_dict(), **weights})
    assert _difference(model, _x(6, 5), second) <= naive.TOLERANCE


def test_a_flat_first_shard_confirms_nothing() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m.b(Square.apply(x, m.w)).tanh()  # type: ignore[operator,no-any-return,no-untyped-call]

    torch.manual_seed(1)
    model = Written(forward, w=nn.Parameter(torch.randn(5)), b=nn.Linear(5, 3)).double()
    x = _x(6, 5)["0"]
    x[:3] = 0
    result = per_sample_gradient(model, [{"0": x[:3]}, {"0": x[3:]}], _squares)
    assert _difference(model, {"0": x}, result) <= naive.TOLERANCE
    assert set(result.loops) == {"w"}


def test_a_further_job_calls_the_model_once_a_shard_and_once_on_one_sample() -> None:
    calls = []

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        calls.append(len(x))
        return m.b(m.a(x).relu())  # type: ignore[operator,no-any-return]

    torch.manual_seed(1)
    model = Written(forward, a=nn.Linear(5, 4), b=nn.Linear(4, 3)).double()
    per_sample_gradient(model, [_x(6, 5)], _squares)
    calls.clear()
    weights = {name: p.detach() * 2 for name, p in model.named_parameters()}
    per_sample_gradient(model, [_x(6, 5)] * 3, _squares, weights=weights)
    assert calls == [6, 1, 6, 6]


def test_a_parameter_that_is_never_reached_costs_no_further_call() -> None:
    calls = []

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        calls.append(len(x))
        m.unused(x)  # type: ignore[operator]
        return m.a(x)  # type: ignore[operator,no-any-return]

    model = Written(forward, a=nn.Linear(5, 4), unused=nn.Linear(5, 4)).double()
    per_sample_gradient(model, [_x(6, 5)], _squares)
    calls.clear()
    result = per_sample_gradient(model, [_x(6, 5)] * 2, _squares)
    assert calls == [6, 1, 6]
    assert set(result.unreached) == {"unused.weight", "unused.bias"}


def test_a_gradient_of_rounding_alone_is_no_failure() -> None:
    def forward(m: nn.Module, x: Tensor, w: Tensor) -> Tensor:
        h = m.a(x)  # type: ignore[operator]
        return ((h - h.mean(1, keepdim=True)) * w).sum((1, 2))[:, None]  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Written(forward, a=nn.Linear(64, 64))
    x = torch.randn(16, 1, 64).expand(16, 4, 64).contiguous()
    inputs = {"x": x, "w": torch.randn(16, 4, 64)}
    result = per_sample_gradient(model, [inputs], _squares, wrt=["a.weight"])
    assert float(result.arrays["a.weight"].abs().max()) < 1e-2


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("samples", [8, 64])
def test_batch_norm_is_seen_in_16_bits(precision: str, samples: int) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    inputs = {"0": torch.randn(samples, 5)}
    with pytest.raises(CoupledSamples, match="'1'"):
        per_sample_gradient(model, [inputs], _squares, mode="train", precision=precision)
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    with pytest.raises(CoupledSamples, match="'1'"):
        per_sample_gradient(narrow, [{"0": inputs["0"].bfloat16()}], _squares, mode="train")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_loss_gets_float32_at_least(precision: str) -> None:
    torch.manual_seed(1)
    model, inputs = nn.Linear(5, 1), {"0": torch.randn(4, 5)}
    result = per_sample_gradient(model, [inputs], lambda z: z[:, 0] + 1000, precision=precision)
    expected = model(inputs["0"])[:, 0].detach() + 1000
    assert result.values is not None
    assert result.values.dtype == torch.float32
    assert float((result.values - expected).abs().max()) < 0.05


def test_a_masked_output_hides_no_coupling() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        z = m.a(x)  # type: ignore[operator]
        return torch.cat([z - z.mean(0), torch.full_like(z[:, :1], -1e9)], 1)

    with pytest.raises(CoupledSamples):
        per_sample_gradient(Written(forward, a=nn.Linear(5, 3)), [{"0": torch.randn(64, 5)}], _sum)


def _sum(z: Tensor) -> Tensor:
    return z[:, :3].square().sum(1)


def test_gradients_that_overflow_are_no_defect_of_the_rules() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(64, 64).half(), torch.randn(4, 64).half()
    result = per_sample_gradient(model, [{"0": x}], lambda z: (z * 1e4).square().sum(1))
    assert not result.arrays["weight"].isfinite().all()


def test_gradients_below_float16_are_no_reason_for_a_loop() -> None:
    for scale in (1.0, 2.0**-22):
        torch.manual_seed(0)
        layers = [nn.Linear(5, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3)]
        model = nn.Sequential(*layers).half()
        with torch.no_grad():
            layers[3].weight *= scale  # type: ignore[operator]
        shards = [{"0": torch.randn(4, 5).half()}]
        result = jacobian(model, shards, mode="train", precision="bf16", wrt=["0.*"])
        assert not result.loops
