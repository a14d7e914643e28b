"""Dense results in pieces and in shards, and progress."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine.per_sample import jacobian, per_sample_gradient, pieces
from tests.engine.per_sample import naive
from tests.engine.per_sample.zoo import Written, build


class Gathered:
    """A sink that puts the pieces together and notes the largest."""

    def __init__(self) -> None:
        self.arrays: dict[str, Tensor] = {}
        self.largest_bytes = 0

    def begin(
        self, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
    ) -> None:
        self.arrays = {
            name: torch.full(shape, torch.nan, dtype=dtypes[name]) for name, shape in shapes.items()
        }

    def write(self, name: str, at: tuple[slice, slice, slice], piece: Tensor) -> None:
        array = self.arrays[name]
        (array if array.dim() > 2 else array[..., None])[at] = piece
        self.largest_bytes = max(self.largest_bytes, piece.nbytes)


@pytest.mark.parametrize("budget_bytes", [64, 700, 10_000, 2**30])
@pytest.mark.parametrize("name", ["convolution, 2d", "bare parameters", "embedding twice and tied"])
def test_pieces_make_up_the_dense_result_within_the_budget(name: str, budget_bytes: int) -> None:
    model, inputs = build(name)
    expected = naive.jacobian(model, inputs)
    shards = [{k: x[:2] for k, x in inputs.items()}, {k: x[2:] for k, x in inputs.items()}]
    sink = Gathered()
    result = jacobian(model, shards, sink=sink, budget_bytes=budget_bytes)
    assert not result.arrays
    assert naive.difference(naive.flat(sink.arrays), naive.flat(expected)) <= naive.TOLERANCE
    row_bytes = max(x[0, 0].nbytes // (x.shape[2] if x.dim() > 2 else 1) for x in expected.values())
    assert sink.largest_bytes <= max(budget_bytes, row_bytes)


def _by_types(m: Any, ids: Tensor, types: Tensor) -> Tensor:
    """Types of tokens are embedded with time first, by the table of ids."""
    of_types = m.e(types.T.flatten()).unflatten(0, types.T.shape).transpose(0, 1)
    weighted = of_types * m.e(ids).detach().cumsum(1)
    return torch.cat([m.a(m.e(ids)).tanh().sum(1), weighted.sum(1)], 1)


def test_outputs_of_every_piece_confirm_a_new_plan() -> None:
    """Types that are all alike do not tell in which order samples and positions are merged."""
    torch.manual_seed(0)
    model = Written(_by_types, e=nn.Embedding(3, 4), a=nn.Linear(4, 4)).double()
    ids = torch.randint(0, 3, (4, 3))
    inputs = {"ids": ids, "types": torch.zeros_like(ids)}
    expected = naive.flat(naive.jacobian(model, inputs))
    found = naive.flat(jacobian(model, [inputs], budget_bytes=2000).arrays)
    assert naive.difference(found, expected) <= naive.TOLERANCE


def test_running_out_of_cuda_memory_halves_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("convolution, 2d")
    expected = naive.jacobian(model, inputs)
    made = pieces.Pieces._piece
    sizes: list[int] = []

    def scarce(self: pieces.Pieces, term: Any, *cut: slice) -> Tensor:
        piece = made(self, term, *cut)
        sizes.append(piece.nbytes)
        if piece.nbytes > 3000:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return piece

    monkeypatch.setattr(pieces.Pieces, "_piece", scarce)
    sink = Gathered()
    jacobian(model, [inputs], sink=sink, budget_bytes=2**20)
    assert max(sizes) > 3000 >= sizes[-1]
    assert naive.difference(naive.flat(sink.arrays), naive.flat(expected)) <= naive.TOLERANCE


@pytest.mark.parametrize("cuts", [[5], [2, 3], [1, 3, 1]])
def test_arrays_of_an_embedding_are_zero_where_no_index_points(cuts: list[int]) -> None:
    model, inputs = build("embedding with padding")
    torch.full((10**6,), torch.nan)  # what the allocator may give next
    shards = [{"0": part} for part in inputs["0"].split(cuts)]
    found = jacobian(model, shards).arrays["a.weight"]
    expected = naive.jacobian(model, inputs)["a.weight"]
    assert naive.difference(found, expected) <= naive.TOLERANCE


def test_results_of_two_jobs_do_not_share_memory() -> None:
    model, inputs = build("embedding with padding")
    first = jacobian(model, [inputs]).arrays["a.weight"]
    kept = first.clone()
    jacobian(model, [{"0": (inputs["0"] + 3) % 11}])
    assert torch.equal(first, kept)


class Stop(BaseException):
    """What an observer raises to end a job."""


def test_progress_counts_samples_and_may_stop_the_job() -> None:
    model, inputs = build("linear")
    shards = [{"0": inputs["0"][:2]}, {"0": inputs["0"][2:]}]
    steps: list[tuple[str, int, int]] = []

    class Watch:
        stop_at = 6

        def step(self, phase: str, done: int, total: int) -> None:
            steps.append((phase, done, total))
            if done >= self.stop_at:
                raise Stop

    per_sample_gradient(model, shards, lambda z: z.sum(1), observer=Watch())
    assert list(dict.fromkeys(steps)) == [("samples", 0, 5), ("samples", 2, 5), ("samples", 5, 5)]
    Watch.stop_at = 2
    with pytest.raises(Stop):
        per_sample_gradient(model, shards, lambda z: z.sum(1), mode="train", observer=Watch())
    assert not model.training
