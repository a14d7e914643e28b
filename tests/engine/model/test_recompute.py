"""Recomputed blocks: the same bits in less memory, or a refusal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradbox_engine import Group, Objective, ReplayMismatch, set_gradient
from gradbox_engine.errors import BadInputs
from gradbox_engine.model.calling.recompute import repeated_blocks
from gradbox_engine.requests import Penalty, Recomputed
from tests.cases import CASES
from tests.device import same_bits
from tests.engine.memory import peak_bytes
from tests.engine.replay.running import answer

WIDTH = 8


class Block(nn.Module):
    """A residual block with dropout, batch norm and a counter, by keyword and by position."""

    def __init__(self, *, checkpointed: str = "") -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.3))
        self.out = nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.num_calls = 0
        self._checkpointed = checkpointed

    def forward(self, x: Tensor, *, scale: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        self.calls += 1
        self.num_calls += 1
        h = self.norm(x) * scale
        if self._checkpointed:
            reentrant = self._checkpointed == "reentrant"
            h = checkpoint(self.layers, h, use_reentrant=reentrant)
        else:
            h = self.layers(h)
        return x + self.out(h) * (1 + self.num_calls % 3) * (1 + self.calls % 2), {"h": h}


class Stack(nn.Module):
    """`depth` blocks, the first of which is called once more where it is shared."""

    def __init__(self, depth: int = 4, *, shared: bool = False, checkpointed: str = "") -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.blocks = nn.ModuleList([Block(checkpointed=checkpointed) for _ in range(depth)])
        self.head = nn.Linear(WIDTH, 3)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.blocks[: int(self.shared)]):
            x, _ = block(x, scale=self.scale)
        return self.head(x)


def spread(z: Tensor) -> Tensor:
    return (z @ z.T).tanh().mean()


def ragged(samples: int = 5) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [{"0": torch.randn(n, WIDTH)} for n in (samples, samples, 2)]


def gradient(model: nn.Module, recompute: str, **options):
    return set_gradient(
        model,
        [Group("z", ragged())],
        Objective(spread),
        returns=("grads", "buffers", "input_grads"),
        recompute=recompute,
        **options,
    )


@pytest.mark.parametrize("name", CASES)
def test_recomputed_submodules_do_not_show(name):
    off = answer(CASES[name](), recompute="off")
    try:
        on = answer(CASES[name](), recompute="*")
    except BadInputs as error:
        assert "overwrites one in place" in str(error)  # noqa: PT017 - an ELU, say, for a block
        return
    assert on.loss == off.loss
    assert all(same_bits(on.grads[n], off.grads[n]) for n in off.grads)
    assert all(same_bits(on.buffers[n], off.buffers[n]) for n in off.buffers)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("retain", [0, 10**9])
@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
@pytest.mark.parametrize(
    "options",
    [{}, {"shared": True}, {"checkpointed": "reentrant"}, {"checkpointed": "other"}],
    ids=str,
)
def test_dropout_buffers_and_checkpoints_repeat(options, mode, retain, precision):
    torch.manual_seed(0)
    model = Stack(**options)
    off, on = (
        gradient(model, recompute, mode=mode, retain=retain, precision=precision)
        for recompute in ("off", "blocks")
    )
    assert on.recomputed.shards == 3
    assert on.recomputed.blocks == ("blocks.0", "blocks.1")
    assert off.recomputed.shards == 0
    assert on.loss == off.loss
    assert on.replay_difference == 0
    assert all(same_bits(on.grads[n], off.grads[n]) for n in off.grads)
    assert all(same_bits(on.buffers[n], off.buffers[n]) for n in off.buffers)
    for one, other in zip(on.input_grads["z"]["0"], off.input_grads["z"]["0"], strict=True):
        assert same_bits(one, other)


def test_blocks_are_the_repeated_children_that_have_modules():
    model = nn.ModuleDict(
        {
            "stem": nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
            "body": nn.Sequential(Stack(2), Stack(3)),
            "tail": nn.ModuleList([Stack(2), Block()]),
        }
    )
    assert list(repeated_blocks(model, "auto")) == [
        "body.0", "body.1", "tail.0.blocks.0", "tail.0.blocks.1",
    ]  # fmt: skip


@pytest.mark.parametrize(("num_blocks", "num_cut"), [(2, 1), (3, 2), (4, 2), (6, 4), (12, 7)])
def test_the_end_of_each_list_is_left_whole(num_blocks, num_cut):
    model = nn.ModuleDict({"a": Stack(num_blocks), "b": nn.Sequential(Residual(), Residual())})
    cut = [f"a.blocks.{i}" for i in range(num_cut)]
    assert list(repeated_blocks(model, "blocks")) == [*cut, "b.0"]


def test_a_pattern_names_the_outermost_that_match():
    model = Stack(3)
    assert list(repeated_blocks(model, "blocks.*")) == ["blocks.0", "blocks.1", "blocks.2"]
    assert list(repeated_blocks(model, "blocks.1")) == ["blocks.1"]
    assert list(repeated_blocks(model, "blocks.?.layers")) == [f"blocks.{i}.layers" for i in "012"]


@pytest.mark.parametrize("asked", ["blocks", "decoder.*", "on"])
def test_a_model_without_such_blocks_is_refused(asked):
    with pytest.raises(BadInputs, match="recompute: expected"):
        set_gradient(
            nn.Linear(WIDTH, 2), [Group("z", ragged())], Objective(spread), recompute=asked
        )


@pytest.mark.parametrize("retain", [0, 10**9])
def test_masks_of_samples_and_penalties_inside_blocks_repeat(retain):
    torch.manual_seed(0)
    model = nn.Sequential(Residual(), Residual(), nn.Linear(WIDTH, 3))
    penalty = Penalty("0.layers", lambda h: h.square().mean(), per_sample_scale=lambda z: z[:, 0])
    off, on = (
        gradient(
            model, recompute, mode="train", streams="sample", penalties=[penalty], retain=retain
        )
        for recompute in ("off", "blocks")
    )
    assert on.recomputed == Recomputed(("0",), 3)
    assert on.loss == off.loss
    assert all(same_bits(on.grads[n], off.grads[n]) for n in off.grads)


class Residual(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.3), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


@pytest.mark.parametrize("retain", [0, 10**9])
def test_only_shards_that_do_not_fit_are_recomputed(retain):
    model = crowded(4)
    shards = [{"0": torch.randn(n, WIDTH)} for n in (2, 5, 3, 4)]

    def run(recompute: str):
        return set_gradient(
            model, [Group("z", shards)], Objective(spread), mode="train", seed=4,
            recompute=recompute, retain=retain,
        )  # fmt: skip

    with pytest.raises(torch.OutOfMemoryError):
        run("off")
    found = run("auto")
    assert found.recomputed == Recomputed(("0", "1", "2"), 2)
    assert not run("auto").recomputed.shards < 2  # whether or not graphs were kept
    model[-1].samples = 10
    expected = run("off")
    assert run("auto").recomputed == Recomputed()
    assert all(same_bits(found.grads[n], expected.grads[n]) for n in expected.grads)


class NoRoom(nn.Module):
    """Runs out of memory from so many samples on, unless the block in front of it is cut out."""

    def __init__(self, samples: int, block: nn.Module) -> None:
        super().__init__()
        self.samples, self.in_front = samples, (block,)

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and len(x) >= self.samples and "forward" not in vars(self.in_front[0]):
            raise torch.OutOfMemoryError("no room")
        return x


def crowded(samples: int, *tail: nn.Module) -> nn.Sequential:
    """Return three blocks of which so many samples do not fit whole."""
    torch.manual_seed(0)
    blocks = [Residual() for _ in range(3)]
    return nn.Sequential(*blocks, NoRoom(samples, blocks[-1]), *tail)


def test_the_peak_is_the_inputs_of_all_blocks_and_the_insides_of_one():
    model = nn.Sequential(*(Residual(32) for _ in range(12)))
    shards = [{"0": torch.randn(500, 32)} for _ in range(2)]

    def peak(recompute: str) -> int:
        return peak_bytes(
            lambda: set_gradient(
                model, [Group("z", shards)], Objective(torch.sum), mode="train", recompute=recompute
            )
        )

    whole = peak("off")
    assert peak("*") < 0.35 * whole
    assert peak("blocks") < 0.55 * whole


class Forgetful(Residual):
    """Whose state no copy is made of."""

    calls: tuple[list[int], ...] = ([],)

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0].append(1)
        return super().forward(x) * len(self.calls[0])


def test_a_block_that_does_not_repeat_itself_is_refused():
    model = nn.Sequential(Forgetful(), Forgetful())
    with pytest.raises(ReplayMismatch, match=r"shard .: block '1'"):
        gradient(model, "*", retain=10**9)


class Cached(nn.Module):
    """Blocks that hand on a cache, as decoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Appending(), Appending()])

    def forward(self, x: Tensor) -> Tensor:
        cache: list[Tensor] = []
        for block in self.blocks:
            x = block(x, cache)
        return x


class Appending(Residual):
    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        cache.append(x)
        if len(cache) > 2:
            raise ValueError("one more than blocks")
        return super().forward(x)


def test_a_cache_that_goes_from_block_to_block_is_refused():
    with pytest.raises(ReplayMismatch, match="use_cache=False"):
        gradient(Cached(), "blocks.*")
    assert gradient(Cached(), "auto").recomputed == Recomputed()
