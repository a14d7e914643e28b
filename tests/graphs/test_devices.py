"""A graph runs on the job's device and chooses none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradbox.errors import GraphRefused
from gradbox_worker.interpreting.build import build
from tests.graphs.test_refused import NODE_Z, call, graph_of


@pytest.mark.parametrize("device", ["meta", "cuda:1", 1])
@pytest.mark.parametrize(
    "place",
    [
        call("to", NODE_Z, {"node": "d"}, op="call_method"),
        call("to", NODE_Z, device={"node": "d"}, op="call_method"),
        call("new_zeros", NODE_Z, 2, device={"node": "d"}, op="call_method"),
        call("torch.ones_like", NODE_Z, device={"node": "d"}),
    ],
)
def test_a_device_in_a_loss_input_is_refused(place: Any, device: Any) -> None:
    graph = graph_of({"op": "placeholder", "name": "d", "target": "d"}, place)
    with pytest.raises(GraphRefused, match="does not choose"):
        build(graph, {}, device="cpu")(torch.ones(2), device)


def test_a_factory_makes_its_tensor_on_the_device_of_the_job() -> None:
    factory = call("torch.ones", 2, device={"node": "d"})
    graph = graph_of({"op": "placeholder", "name": "d", "target": "d"}, factory)
    assert build(graph, {}, device="cpu")(torch.ones(2), "meta").device.type == "cpu"
