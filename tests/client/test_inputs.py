"""The forms that inputs may have, and how shards and tensors become blobs."""

from __future__ import annotations

import asyncio
from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gradbox import (
    AsyncGradClient,
    Builtin,
    GradClient,
    Gradient,
    InvalidInputs,
    InvalidJob,
    Penalty,
)
from gradbox.inputs.shards import read_groups
from gradbox.inputs.uploads import LONE_BYTES, PACK_BYTES, Uploads
from gradbox.protocol import GraphLoss
from gradbox.tensors.tensor_bytes import tensor_bytes

X = torch.ones(2, 3)
SCALE = torch.ones(3)


def total(z: Tensor) -> Tensor:
    return z.sum()


def names(inputs: Any, **given: Any) -> dict[str, list[list[str]]]:
    groups = read_groups(inputs, **({"method": "forward"} | given))
    return {group.name: [sorted(shard) for shard in group.shards] for group in groups}


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ([X, X], {"z": [["0"], ["0"]]}),
        ([np.ones(3)], {"z": [["0"]]}),
        ([(X, X)], {"z": [["0", "1"]]}),
        ((X,), {"z": [["0"]]}),
        ([{"x": X, "mask": X}], {"z": [["mask", "x"]]}),
        ([UserDict(x=X)], {"z": [["x"]]}),
        ({"a": [X], "b": [{"x": X}, {"x": X}]}, {"a": [["0"]], "b": [["x"], ["x"]]}),
        ((x for x in (X, X)), {"z": [["0"], ["0"]]}),
    ],
    ids=["tensors", "arrays", "tuples", "tuple", "dicts", "encoding", "groups", "generator"],
)
def test_inputs_are_read_in_every_form(inputs: Any, expected: dict[str, list[list[str]]]) -> None:
    assert names(inputs) == expected


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ([], "empty list"),
        ({}, "empty dict"),
        ({"a": []}, "group 'a'.*empty list"),
        (X, r"split\(16\)"),
        ({"x": X}, r"write \[shard\]"),
        ("text", "list of shards"),
        (None, "list of shards"),
        ([{}], "at least one argument"),
        ([3], "shard 0 of group 'z'.*int"),
        ([{"x": X, "output_attentions": True}], "'output_attentions'.*where it is registered"),
        ([{"x": X}, {"y": X}], r"shard 1 .*\['y'\], expected \['x'\] like shard 0"),
        ([{"x": [1, 2]}], "argument 'x'.*return_tensors"),
        ([{"a b": X}], "names of the model's arguments"),
        ([{"01": X}], "names of the model's arguments"),
        ({"a-b": [X]}, "arguments of the loss"),
        ([np.array([None])], "object"),
    ],
)
def test_inputs_that_fit_nothing_are_refused(inputs: Any, said: str) -> None:
    with pytest.raises(InvalidInputs, match=said):
        Gradient(model="m", inputs=inputs, loss=total)


def test_an_entry_point_for_an_unknown_group_is_refused() -> None:
    with pytest.raises(InvalidInputs, match="'c'"):
        names({"a": [X], "b": [X]}, method={"c": "encode"})


def test_a_thousand_small_shards_are_one_blob() -> None:
    uploads = Uploads()
    groups = read_groups([torch.ones(100) * i for i in range(1000)], method="forward")
    (group,) = uploads.groups(groups)
    assert len(uploads.blobs) == 1
    assert len(group.shards) == 1000
    assert group.shards[7].prefix == "z/7/"


def test_shards_are_pooled_up_to_a_bound() -> None:
    uploads = Uploads()
    third = torch.empty(PACK_BYTES // 3 // 4)
    groups = read_groups([third.fill_(i).clone() for i in range(5)], method="forward")
    (group,) = uploads.groups(groups)
    assert [shard.blob for shard in group.shards] == [
        uploads.blobs[0].digest,
        uploads.blobs[0].digest,
        uploads.blobs[0].digest,
        uploads.blobs[1].digest,
        uploads.blobs[1].digest,
    ]


def test_a_large_tensor_keeps_its_blob_whatever_changes_beside_it() -> None:
    def blob_of_large(bias: float) -> str:
        large = torch.arange(LONE_BYTES // 4).float()
        tensors = {"w": large, "b": torch.full((3,), bias)}
        described = {name: tensor_bytes(value, where=name) for name, value in tensors.items()}
        return Uploads().tensors(described)["w"].blob

    assert blob_of_large(0.0) == blob_of_large(1.0)


def test_equal_computations_have_equal_specs_and_blobs() -> None:
    def prepared() -> Any:
        return Gradient(model="m", inputs=[X, X * 2], loss=total, wrt="a.*").prepare()

    one, other = prepared(), prepared()
    assert one.spec == other.spec
    assert [b.digest for b in one.blobs] == [b.digest for b in other.blobs]


def test_plain_loss_inputs_become_part_of_the_graph() -> None:
    def scaled(z: Tensor, target: Tensor, scale: float, squared: bool) -> Tensor:
        distance = (z - target) * scale
        return distance.square().sum() if squared else distance.abs().sum()

    given = {"target": X, "scale": np.float32(2.0), "squared": True}
    spec = Gradient(model="m", inputs=[X], loss=scaled, loss_inputs=given).prepare().spec
    assert isinstance(spec.loss, GraphLoss)
    assert list(spec.loss_inputs) == ["target"]
    targets = [node.target for node in spec.loss.function.graph.nodes]
    assert "square" in targets
    assert "abs" not in targets


def test_what_requires_grad_is_marked_so() -> None:
    weight = torch.ones(3, requires_grad=True)
    given = {"weight": weight, "labels": torch.arange(3)}
    spec = (
        Gradient(
            model="m",
            inputs=[X],
            loss=lambda z, weight, labels: (z * weight)[labels].sum(),
            loss_inputs=given,
        )
        .prepare()
        .spec
    )
    marks = {name: getattr(ref, "requires_grad", None) for name, ref in spec.loss_inputs.items()}
    assert marks == {"weight": True, "labels": False}


BAD_FIELDS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "mode": (InvalidJob, "mode", {"mode": "training"}),
    "seed": (InvalidJob, "seed", {"seed": -1}),
    "priority": (InvalidJob, "priority", {"priority": 11}),
    "time": (InvalidJob, "timeout_s", {"timeout_s": 0}),
    "returns": (InvalidJob, "returns", {"returns": ("gradients",)}),
    "wrt": (InvalidJob, "wrt", {"wrt": []}),
    "loss": (InvalidJob, "Builtin", {"loss": "info_nce"}),
    "builtin": (InvalidJob, "did you mean .info_nce.", {"loss": Builtin("info_nc")}),
    "option": (InvalidJob, "heat", {"loss": Builtin("info_nce", heat=1.0)}),
    "class": (InvalidJob, r"pass an instance of it, MSELoss\(", {"loss": torch.nn.MSELoss}),
    "readout": (InvalidJob, "readout: expected a function or an nn.Module, got", {"readout": "m"}),
    "penalty": (InvalidJob, r"a list of Penalty", {"penalties": Penalty(at="0", loss=total)}),
    "penalties": (InvalidJob, r"a list of Penalty", {"penalties": [{"at": "0"}]}),
    "loss inputs": (InvalidInputs, "loss_inputs: expected {name", {"loss_inputs": torch.ones(2)}),
    "loss input of a group's name": (
        InvalidInputs,
        r"than those of the groups, got \['a'\]",
        {"inputs": {"a": [X], "b": [X]}, "loss_inputs": {"a": X}},
    ),
    "loss input": (InvalidInputs, "as_tensor", {"loss_inputs": {"labels": [1, 2]}}),
    "weights": (InvalidInputs, "state_dict", {"weights": torch.nn.Linear(2, 2)}),
    "weight": (InvalidInputs, "weights", {"weights": {"a": 3.0}}),
}


@pytest.mark.parametrize("name", BAD_FIELDS)
def test_a_field_that_no_job_can_have_is_refused_before_anything_is_sent(name: str) -> None:
    error, said, fields = BAD_FIELDS[name]
    with pytest.raises(error, match=said):
        Gradient(**({"model": "m", "inputs": [X], "loss": total} | fields)).prepare()


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda: X.to("meta"), "another device"),
        (lambda: X.to_sparse(), "to_dense"),
        (lambda: torch.nested.nested_tensor([X, X], layout=torch.jagged), "to_padded_tensor"),
    ],
    ids=["meta", "sparse", "nested"],
)
def test_a_tensor_without_plain_values_is_told_its_own_way_out(
    make: Callable[[], Tensor], advice: str
) -> None:
    tensor = make()
    with pytest.raises(InvalidInputs, match=f"holds values, got [^;]*; [^;]*{advice}[^;]*$"):
        tensor_bytes(tensor, where="x")


@pytest.mark.parametrize(
    ("given", "got"), [({"model": "m"}, "dict"), ([], "list"), (Gradient, "the class Gradient")]
)
def test_what_is_no_computation_is_refused(given: Any, got: str) -> None:
    with GradClient("http://127.0.0.1:1", "token") as client:
        for send in (client.submit, client.run, client.batch().submit):
            with pytest.raises(InvalidJob, match=f"such as Gradient.*got {got}$"):
                send(given)


def test_what_is_no_computation_is_refused_to_an_event_loop_too() -> None:
    async def send_both() -> None:
        async with AsyncGradClient("http://127.0.0.1:1", "token") as client:
            for send in (client.submit, client.run):
                with pytest.raises(InvalidJob, match=r"got the class Gradient$"):
                    await send(Gradient)  # type: ignore[arg-type]

    asyncio.run(send_both())
