"""The example of a model's description is a call that it takes, and leaves it as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine.model.state.written_parameters import why_load_again
from gradbox_worker.models.builders import build_model
from gradbox_worker.models.example import find_example
from tests.worker.test_builders import entry, minilm_folder


class Scores(nn.Module):
    """Two inputs for two layers, and an output with a name."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.context = nn.Linear(5, 6)

    def forward(self, ids: Tensor, context: Tensor) -> dict[str, Tensor]:
        score = (self.words(ids).mean(1) * self.context(context)).sum(-1)
        return {"ids": ids, "score": score}


class Counting(nn.Linear):
    """Counts its calls in a buffer, in an attribute, and in a list."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.calls = 0
        self.seen: list[int] = []
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(len(x))
        self.mean.add_(x.detach().mean(0))
        return super().forward(x)


class Picky(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("not today")


MODELS: dict[str, tuple[Any, list[tuple[str, list[int], str]], Any]] = {
    "linear": (lambda: nn.Linear(3, 2), [("input", [2, 3], "float32")], None),
    "half": (
        lambda: nn.Linear(3, 2, dtype=torch.bfloat16), [("input", [2, 3], "bfloat16")], None,
    ),
    "embedding": (lambda: nn.Embedding(7, 4), [("input", [2, 8], "int64")], None),
    "images": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 26 * 26, 2)),
        [("input", [2, 3, 28, 28], "float32")], None,
    ),
    "recurrent": (lambda: nn.GRU(5, 4, batch_first=True), [("input", [2, 8, 5], "float32")], 0),
    "two layers": (
        Scores, [("ids", [2, 8], "int64"), ("context", [2, 5], "float32")], "score",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_inputs_are_found_from_the_layers(name: str) -> None:
    build, inputs, output = MODELS[name]
    found = find_example(build(), "forward")
    assert found is not None
    assert [(given.name, given.shape, given.dtype) for given in found.inputs] == inputs
    assert found.output == output


def test_whole_numbers_stay_in_the_vocabulary() -> None:
    found = find_example(nn.Embedding(7, 4), "forward")
    assert found is not None
    assert found.inputs[0].high == 7


def test_a_transformers_model_is_called_with_ids_and_a_mask() -> None:
    model = build_model(entry("hf", str(minilm_folder())))
    found = find_example(model, "forward")
    assert found is not None
    assert {given.name: given.high for given in found.inputs} == {
        "input_ids": 30522,
        "attention_mask": 2,
    }
    assert (found.output, found.output_shape) == ("last_hidden_state", [2, 8, 384])


def test_the_model_is_as_it_was() -> None:
    model = Counting()
    assert find_example(model, "forward") is not None
    assert (model.calls, model.seen, model.mean.tolist()) == (0, [], [0.0, 0.0, 0.0])


def test_the_callers_random_numbers_are_as_they_were() -> None:
    model = nn.Linear(3, 2)
    state = torch.get_rng_state()
    find_example(model, "forward")
    assert torch.equal(state, torch.get_rng_state())


def test_a_model_that_takes_nothing_of_it_has_no_example() -> None:
    assert find_example(Picky(3, 2), "forward") is None


class Decaying(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        self.weight.data.mul_(0.5)
        return super().forward(input)


def test_a_model_that_writes_to_itself_for_an_example_is_known_to() -> None:
    model = Decaying(3, 2)
    assert find_example(model, "forward") is None
    assert "'weight'" in (why_load_again(model) or "")
