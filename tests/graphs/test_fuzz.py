"""Graphs that no person would write are refused or pass, and raise nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gradbox.errors import GraphRefused
from gradbox.graphs import allow_list
from gradbox.graphs.check import check_graph
from gradbox.graphs.schema import Graph
from gradbox_worker.interpreting.build import build
from tests.graphs.test_refused import FORMS, LIMIT, MODEL_ERRORS

ANY = settings(deadline=None, suppress_health_check=list(HealthCheck))
NAMES = st.sampled_from(["z", "x", "y", "output", "weight", "", "__class__", "é", "a" * 201])
TAGS = st.sampled_from(
    ["node", "tuple", "slice", "dict", "dtype", "float", "complex", "ellipsis", "device", "x"]
)
JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.text(max_size=6),
        NAMES,
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(TAGS, st.text(max_size=3)), inner, max_size=2),
    ),
    max_leaves=8,
)
OPS = st.sampled_from(["placeholder", "get_attr", "call_function", "call_method", "output", "x"])
TARGETS = st.one_of(NAMES, st.sampled_from(sorted(allow_list.FUNCTIONS)), st.text(max_size=5))
NODES = st.fixed_dictionaries(
    {"op": OPS, "name": NAMES, "target": TARGETS},
    optional={
        "args": st.one_of(st.lists(JSON, max_size=3), JSON),
        "kwargs": st.one_of(st.dictionaries(NAMES, JSON, max_size=2), JSON),
    },
)
KEYWORDS = st.dictionaries(
    st.sampled_from("dim keepdim dtype device out inplace eps size reduction other input".split()),
    FORMS,
    max_size=3,
)


@pytest.mark.parametrize("num_inputs", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_any_json_is_refused_or_a_graph(num_inputs: int) -> None:
    @settings(ANY, max_examples=num_inputs)
    @given(st.lists(NODES, max_size=5), st.booleans())
    def holds(nodes: list[Any], ended: bool) -> None:
        last = {"op": "output", "name": "last", "target": "output", "args": [{"node": "z"}]}
        text = json.dumps({"nodes": [*nodes, last] if ended else nodes})
        try:
            graph = Graph.model_validate_json(text)
        except ValidationError:
            return
        try:
            check_graph(graph, {"weight"}, positional=1, arguments=["y"])
        except GraphRefused:
            return
        assert graph.nodes[-1].op == "output"

    holds()


@pytest.mark.parametrize("num_inputs", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_any_call_with_keywords_is_refused_or_computes(num_inputs: int) -> None:
    @settings(ANY, max_examples=num_inputs)
    @given(st.sampled_from(sorted(allow_list.FUNCTIONS)), st.lists(FORMS, max_size=2), KEYWORDS)
    def holds(target: str, args: list[Any], kwargs: dict[str, Any]) -> None:
        read = {"op": "get_attr", "name": "x1", "target": "weight"}
        called = {
            "op": "call_function",
            "name": "x2",
            "target": target,
            "args": [{"node": "z"}, *args],
            "kwargs": kwargs,
        }
        nodes = [
            {"op": "placeholder", "name": "z", "target": "z"},
            read,
            called,
            {"op": "output", "name": "out", "target": "out", "args": [{"node": "x2"}]},
        ]
        weight = torch.ones(2, 2)
        try:
            function = build(Graph(nodes=nodes), {"weight": weight}, device="cpu")  # type: ignore[arg-type]
            with LIMIT.held():
                function(torch.ones(2, 2))
        except (GraphRefused, ValidationError, *MODEL_ERRORS):
            pass
        assert torch.equal(weight, torch.ones(2, 2))

    holds()
