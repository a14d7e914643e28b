"""Factored files that lie are refused with a ProtocolError; honest ones of every layer are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gradbox import GradResult, ProtocolError
from gradbox.protocol import PROTOCOL, Receipt, Seconds
from gradbox_engine.per_sample import jacobian
from gradbox_worker.computations.factors import described
from tests.engine.per_sample import zoo

Terms = list[dict[str, Any]]
Tensors = dict[str, torch.Tensor]
B, Y = 3, 2


def result(
    folder: Path, tensors: Tensors, metadata: str, *, names: list[str], samples: int = B, y: int = Y
) -> GradResult:
    receipt = Receipt(
        protocol=PROTOCOL, job="j", spec_digest="", computation="jacobian", model="m",
        model_version="", seed=0, mode="eval", precision="fp32", device="cpu", torch="", gradbox="",
        shards={"z": 1}, names=tuple(names), samples=samples, outputs=y, reduce="none",
        form="factored", seconds=Seconds(), peak_memory_bytes=0, memory_before_bytes=0,
    )  # fmt: skip
    path = folder / "result.safetensors"
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(
        whole, path, metadata={"gradbox": receipt.model_dump_json(), "gradbox_factors": metadata}
    )
    return GradResult.load(path)


@pytest.mark.parametrize("name", zoo.CASES)
def test_what_the_engine_keeps_of_every_layer_is_read(name: str, tmp_path: Path) -> None:
    model, inputs = zoo.build(name)
    factors = jacobian(model, [inputs], form="factored").factors
    assert factors is not None
    tensors, metadata = described(factors)
    found = result(
        tmp_path,
        tensors,
        metadata["gradbox_factors"],
        names=list(factors.names),
        samples=factors.samples,
        y=factors.outputs,
    )
    for parameter in factors.names:
        torch.testing.assert_close(found.grads[parameter][()], factors.block(parameter))


def honest() -> tuple[Tensors, Terms]:
    """The factors of one shard: a linear layer with its bias, an embedding, a convolution."""
    tensors = {
        "left": torch.ones(Y, B, 1, 4),
        "right": torch.ones(B, 1, 5),
        "looked": torch.ones(Y, B, 2, 6),
        "ids": torch.tensor([[0, 1], [2, 3], [6, 6]]),
        "out": torch.ones(Y, B, 1, 4, 3, 3),
        "in": torch.ones(B, 1, 2, 5, 5),
        "empty": torch.ones(B, Y, 0),
    }
    walk = {"kernel": [3, 3], "stride": [2, 2], "padding": [1, 1], "dilation": [1, 1]}
    terms: Terms = [
        {"parameter": "weight", "shape": [4, 5], "rule": "outer",
         "geometry": {"transposed": False}, "tensors": {"left": "left", "right": "right"}},
        {"parameter": "bias", "shape": [4], "rule": "positions",
         "geometry": {"channels_first": False}, "tensors": {"left": "left"}},
        {"parameter": "table", "shape": [7, 6], "rule": "lookup",
         "geometry": {}, "tensors": {"left": "looked", "ids": "ids"}},
        {"parameter": "kernel", "shape": [4, 2, 3, 3], "rule": "convolution",
         "geometry": {**walk, "groups": 1, "transposed": False},
         "tensors": {"left": "out", "right": "in"}},
        {"parameter": "unused", "shape": [2], "rule": "zero",
         "geometry": {}, "tensors": {"empty": "empty"}},
        {"parameter": "tied", "shape": [4, 5], "rule": "total",
         "geometry": {"terms": [{"rule": "outer", "transposed": False},
                                {"rule": "zero"}]},
         "tensors": {"0.left": "left", "0.right": "right", "1.empty": "empty"}},
    ]  # fmt: skip
    return tensors, terms


def read_all(folder: Path, tensors: Tensors, terms: Terms, *, pieces: int = 1) -> None:
    found = result(
        folder,
        tensors,
        json.dumps({"pieces": [terms] * pieces}),
        names=[term["parameter"] for term in honest()[1]],
    )
    for gradient in found.grads.values():
        assert gradient[()].shape[:2] == (B, Y)
    found.gram()


def test_honest_factors_are_read(tmp_path: Path) -> None:
    read_all(tmp_path, *honest())


LIES: dict[str, Callable[[Tensors, Terms], Any]] = {
    "a tensor that is missing": lambda tensors, terms: tensors.pop("looked"),
    "a name that is missing": lambda tensors, terms: terms[0]["tensors"].pop("right"),
    "a tensor of another rank": lambda tensors, terms: tensors.update(left=torch.ones(Y, B, 4)),
    "fewer samples in one tensor": lambda tensors, terms: tensors.update(right=torch.ones(2, 1, 5)),
    "other positions": lambda tensors, terms: tensors.update(right=torch.ones(B, 2, 5)),
    "other outputs": lambda tensors, terms: tensors.update(looked=torch.ones(5, B, 2, 6)),
    "other columns": lambda tensors, terms: tensors.update(right=torch.ones(B, 1, 6)),
    "integers for floats": lambda tensors, terms: tensors.update(right=tensors["right"].int()),
    "floats for ids": lambda tensors, terms: tensors.update(ids=tensors["ids"].float()),
    "an id below the table": lambda tensors, terms: tensors["ids"].fill_(-1),
    "an id behind the table": lambda tensors, terms: tensors["ids"].fill_(7),
    "an id in a total": lambda tensors, terms: (
        tensors["ids"].fill_(10**6),
        terms[5].update(
            shape=[7, 6],
            geometry={"terms": [{"rule": "lookup"}]},
            tensors={"0.left": "looked", "0.ids": "ids"},
        ),
    ),
    "another shape": lambda tensors, terms: terms[0].update(shape=[5, 4]),
    "a shape without dims": lambda tensors, terms: terms[1].update(shape=[]),
    "a shape below 0": lambda tensors, terms: terms[0].update(shape=[-4, -5]),
    "a huge shape": lambda tensors, terms: terms[2].update(shape=[2**80, 6]),
    "no flag": lambda tensors, terms: terms[0].update(geometry={}),
    "a kernel of another size": lambda tensors, terms: terms[3]["geometry"].update(kernel=[1, 1]),
    "a kernel of 3 dims": lambda tensors, terms: terms[3]["geometry"].update(kernel=[3, 3, 3]),
    "a step of 0": lambda tensors, terms: terms[3]["geometry"].update(stride=[0, 0]),
    "a longer walk": lambda tensors, terms: terms[3]["geometry"].update(stride=[1, 1]),
    "groups that divide nothing": lambda tensors, terms: terms[3]["geometry"].update(groups=3),
    "padding beyond all memory": lambda tensors, terms: terms[3]["geometry"].update(
        padding=[2**40, 2**40]
    ),
    "a rule that there is not": lambda tensors, terms: terms[0].update(rule="magic"),
    "such a rule in a total": lambda tensors, terms: terms[5]["geometry"]["terms"].append(
        {"rule": "magic"}
    ),
    "a total of nothing": lambda tensors, terms: terms[5].update(geometry={"terms": []}),
    "a total of words": lambda tensors, terms: terms[5].update(geometry={"terms": ["outer"]}),
    "a zero that is not empty": lambda tensors, terms: tensors.update(empty=torch.ones(B, Y, 1)),
    "a parameter that is missing": lambda tensors, terms: terms.pop(),
    "a parameter twice": lambda tensors, terms: terms.append(terms[0]),
    "no rule": lambda tensors, terms: terms[0].pop("rule"),
    "geometry that is none": lambda tensors, terms: terms[0].update(geometry=[]),
}


@pytest.mark.parametrize("lie", LIES)
def test_factors_that_lie_are_a_protocol_error(lie: str, tmp_path: Path) -> None:
    tensors, terms = honest()
    LIES[lie](tensors, terms)
    with pytest.raises(ProtocolError):
        read_all(tmp_path, tensors, terms)


@pytest.mark.parametrize("pieces", [0, 2])
def test_pieces_that_do_not_add_up_to_the_receipt_are_a_protocol_error(
    pieces: int, tmp_path: Path
) -> None:
    with pytest.raises(ProtocolError, match="samples"):
        read_all(tmp_path, *honest(), pieces=pieces)


def test_nesting_without_end_is_a_protocol_error(tmp_path: Path) -> None:
    tensors, terms = honest()
    geometry: dict[str, Any] = {"rule": "zero"}
    for _ in range(100):
        geometry = {"rule": "total", "terms": [geometry]}
    terms[5].update(geometry=geometry)
    with pytest.raises(ProtocolError):
        read_all(tmp_path, tensors, terms)
