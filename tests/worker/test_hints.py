"""What a user is told when the model or the loss raises: where, with what, and what may help."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import BadOutput, Group, ModelCallFailed, Objective, set_gradient
from gradbox_worker.hints import with_hint


class Language(nn.Module):
    """Token and position embeddings, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {"words": nn.Embedding(10, 4), "places": nn.Embedding(6, 4)}
        )
        self.head = nn.Linear(4, 2)

    def forward(self, ids: Tensor, scale: Tensor | None = None) -> Tensor:
        hidden = self.embeddings["words"](ids)
        hidden = hidden + self.embeddings["places"](torch.arange(ids.shape[1]))
        if scale is not None:
            hidden = hidden * scale  # where shapes may differ
        return self.head(hidden).mean(1)


class OfSixPlaces(nn.Module):
    """Adds positions from a table as long as it takes, or types from one that it expands."""

    def __init__(self, *, expanded: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4)
        self.places = nn.Parameter(torch.randn(6, 4))
        self.expanded = expanded

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        length = ids.shape[1]
        if self.expanded:
            ids = ids + ids.new_zeros(1, 6)[:, :length].expand(len(ids), length)
        ids = ids if mask is None else ids * mask
        return (self.words(ids) + self.places[:length]).mean(1)


class OnTheWrongDevice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.ones(3, device="meta")


def failure(
    model: nn.Module, shard: dict[str, Any], loss: Callable[..., Tensor] = torch.sum, **inputs: Any
) -> str:
    objective = Objective(function=loss, inputs=inputs, parameters={})
    return told(model, objective, shard)


def told(model: nn.Module, objective: Objective, *shards: dict[str, Any], **options: Any) -> str:
    with pytest.raises((ModelCallFailed, BadOutput)) as caught:
        set_gradient(model, [Group(name="z", shards=shards)], objective, **options)
    return with_hint(caught.value)


class OfItsOwnDtype(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.layer((x > 0).to(torch.float32))
        return z


IDS = torch.tensor([[1, 2, 3]])
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor], Sequence[str]]] = {
    "a tensor of a dtype of the model's own": (
        lambda: OfItsOwnDtype().double(),
        {"0": torch.ones(5, 3, dtype=torch.float64)},
        ["hint: the model and its inputs are float64", "dtype=x.dtype", "precision='fp64'"],
    ),
    "float64 into a float32 model": (
        lambda: nn.Sequential(nn.Linear(3, 2)),
        {"0": torch.ones(5, 3, dtype=torch.float64)},
        [
            "arguments: argument 0 float64 (5, 3)",
            "submodule: 0 (Linear)",
            "hint: the model is float32 and argument 0 is float64",
            "torch.float32",
            "precision='fp64'",
        ],
    ),
    "an id out of the vocabulary": (
        Language,
        {"ids": torch.tensor([[1, 30]])},
        [
            "arguments: ids int64 (1, 2)",
            "submodule: embeddings.words (Embedding)",
            "line: test_hints.py:",
            ': hidden = self.embeddings["words"](ids)',
            "hint: the embedding has rows 0 to 9, and ids holds 1 to 30",
        ],
    ),
    "more positions than there are": (
        Language,
        {"ids": torch.ones(1, 7, dtype=torch.int64)},
        [
            "submodule: embeddings.places (Embedding)",
            "hint: sequences of 7 tokens came, and the model has 6 positions",
        ],
    ),
    "more tokens than a table of positions has": (
        OfSixPlaces,
        {"ids": torch.ones(2, 7, dtype=torch.int64)},
        ["hint: sequences of 7 tokens came, and the model has 6 positions"],
    ),
    "more tokens than a buffer that is expanded": (
        lambda: OfSixPlaces(expanded=True),
        {"ids": torch.ones(2, 7, dtype=torch.int64)},
        ["hint: sequences of 7 tokens came, and the model has 6 positions"],
    ),
    "a mask of another length than the ids": (
        OfSixPlaces,
        {"ids": IDS, "mask": IDS[:, :2]},
        ["hint: sizes 3 and 2 cannot be combined"],
    ),
    "features of whole numbers": (
        lambda: nn.Sequential(nn.Linear(3, 2)),
        {"0": torch.ones(5, 3, dtype=torch.int64)},
        ["hint: the model is float32: convert inputs that are no ids with .to(torch.float32)"],
    ),
    "ids in floating point": (
        Language,
        {"ids": IDS.float()},
        ["arguments: ids float32 (1, 3)", "hint: ids, indices and class labels are int64"],
    ),
    "another device": (
        OnTheWrongDevice,
        {"0": torch.ones(2, 3)},
        ["submodule: the model itself (OnTheWrongDevice)", "hint:", "device=x.device"],
    ),
    "an argument that is missing": (
        Language,
        {"scale": torch.ones(1)},
        ["arguments: scale float32 (1,)", "missing", "Language.forward takes (ids", "give scale"],
    ),
    "an argument that is not there": (
        Language,
        {"ids": IDS, "mask": IDS},
        ["unexpected keyword", "hint: Language.forward takes (ids", "the shards give ids, mask"],
    ),
    "a layer of another width": (
        lambda: nn.Sequential(nn.Tanh(), nn.Linear(5, 4)),
        {"0": torch.ones(2, 7)},
        ["submodule: 1 (Linear)", "hint: this layer takes 5 features", "gets 7"],
    ),
    "images with their channels last": (
        lambda: nn.Conv2d(3, 4, 3),
        {"0": torch.ones(2, 8, 8, 3)},
        ["hint: a convolution takes (samples, 3 channels", "gets 8 channels"],
    ),
    "shapes that do not fit": (
        Language,
        {"ids": IDS, "scale": torch.ones(5)},
        ["scale float32 (5,)", "test_hints.py", "hint: sizes 4 and 5 cannot be combined"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_model_that_raises_is_described(name: str) -> None:
    make, shard, said = CASES[name]
    message = failure(make(), shard)
    assert message.startswith("group 'z', shard 0: the model raised ")
    for words in said:
        assert words in message, message
    assert "/" not in message.split("hint:")[0].replace("\n", " "), message


def test_a_loss_that_raises_is_described() -> None:
    def loss(z: Tensor, target: Tensor) -> Tensor:
        return (z - target).sum()

    message = failure(nn.Linear(3, 2), {"0": torch.ones(4, 3)}, loss, target=torch.ones(3))
    assert message.startswith("objective: the loss raised RuntimeError")
    assert "arguments: z float32 (4, 2), target float32 (3,)" in message
    assert "line: test_hints.py" in message
    assert "hint: sizes 2 and 3 cannot be combined" in message


def test_targets_of_other_samples_than_z_has_are_told_of() -> None:
    def loss(z: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(z, target)

    target = torch.ones(6, dtype=torch.int64)
    message = failure(nn.Linear(3, 2), {"0": torch.ones(4, 3)}, loss, target=target)
    assert "hint: z has 4 rows and the target 6; it needs one for each sample" in message


def test_an_output_of_several_tensors_that_is_indexed_like_one_is_told_of() -> None:
    shard, (first, second) = {"0": torch.ones(4, 3)}, (nn.Linear(3, 2), nn.Linear(3, 2))

    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return first(x), second(x)

    def readout(output: Any, inputs: dict[str, Tensor]) -> Tensor:
        z: Tensor = output[:, 0]
        return z

    message = told(Two(), Objective(torch.sum), shard, readout=readout)
    assert re.search(r"hint: .*: choose one by output=", message)


def test_hidden_states_that_a_model_does_not_return_are_told_how_to_ask_for() -> None:
    def readout(output: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        raise KeyError("no field 'hidden_states'; the value has last_hidden_state")

    shard, model = {"0": torch.ones(4, 3)}, nn.Linear(3, 2)
    for chosen in ({"readout": readout}, {"output": "hidden_states"}):
        message = told(model, Objective(torch.sum), shard, **chosen)
        assert message.endswith("kwargs = {output_hidden_states = true}")
        assert message.count("hint: ") == 1


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_class_labels_of_another_dtype_are_told_theirs(dtype: torch.dtype) -> None:
    def loss(z: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(z, target)

    target = torch.ones(4, dtype=dtype)
    message = failure(nn.Linear(3, 2), {"0": torch.ones(4, 3)}, loss, target=target)
    assert "hint: ids, indices and class labels are int64: convert them" in message


def test_a_readout_that_raises_is_blamed_instead_of_the_model() -> None:
    def readout(output: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        return inputs["mask"] * output

    objective = Objective(function=torch.sum, inputs={}, parameters={})
    message = told(nn.Linear(3, 2), objective, {"0": torch.ones(4, 3)}, readout=readout)
    assert message.startswith("group 'z', shard 0: the readout raised KeyError: 'mask'")
    assert "arguments: output float32 (4, 2), inputs {0: float32 (4, 3)}" in message


def test_values_and_folders_stay_on_the_box() -> None:
    message = failure(nn.Linear(3, 2), {"0": torch.full((4, 5), 41.5)})
    assert "41.5" not in message
    assert torch.__file__.rpartition("/")[0] not in message


def test_an_error_that_is_not_known_has_no_hint() -> None:
    class Refusing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ZeroDivisionError("because")

    message = failure(Refusing(), {"0": torch.ones(1)})
    assert "ZeroDivisionError: because" in message
    assert "hint: " not in message


class Caching(nn.Module):
    """Keeps a tensor that it makes of its parameter, with the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = self.weight.exp()
        return x * self.cache


def test_a_graph_that_a_model_keeps_in_an_attribute_is_told_of() -> None:
    shards = [{"0": torch.ones(n, 3)} for n in (2, 1, 3)]
    message = told(Caching(), Objective(torch.sum), *shards)
    assert re.search(r"hint: .*a cache in an attribute: detach it", message)


def test_what_was_called_does_not_leave_the_process() -> None:
    shard = {"0": torch.ones(5, 3, dtype=torch.float64)}
    with pytest.raises(ModelCallFailed) as caught:
        set_gradient(nn.Linear(3, 2), [Group("z", [shard])], Objective(torch.sum))
    error = caught.value
    error.args = (with_hint(error),)
    sent = copy.copy(error)  # by what sends it, too
    assert error.call is not None
    assert sent.call is None
    assert with_hint(sent) == str(error) == with_hint(error)
