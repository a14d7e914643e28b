"""A stranger's graph is refused before anything of it runs, or while it runs, never obeyed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gradbox.errors import GraphRefused, InvalidInputs
from gradbox.graphs import allow_list, targets
from gradbox.graphs.check import check_graph
from gradbox.graphs.schema import Graph
from gradbox_engine import is_out_of_memory
from gradbox_worker.computations.memory_limit import MemoryLimit
from gradbox_worker.interpreting.build import build

Z = {"op": "placeholder", "name": "z", "target": "z"}
LIMIT = MemoryLimit(torch.device("cpu"), job_bytes=2**28)
NODE_Z = {"node": "z"}


def call(target: str, *args: Any, name: str = "x", op: str = "call_function", **kwargs: Any) -> Any:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def graph_of(*nodes: Any, returns: Any = None) -> Graph:
    last = nodes[-1]["name"] if nodes else "z"
    output = {"op": "output", "name": "output", "target": "output"}
    output["args"] = [{"node": last} if returns is None else returns]
    return Graph.model_validate_json(json.dumps({"nodes": [Z, *nodes, output]}))


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


REFUSED_BEFORE = {
    "a shell": (call("os.system", "true"), "allow-list"),
    "eval": (call("builtins.eval", "1"), "allow-list"),
    "an unlisted torch function": (call("torch.load", "file"), "allow-list"),
    "random numbers": (call("torch.rand", 3), "allow-list"),
    "a method that runs a callable": (call("apply_", NODE_Z, 1, op="call_method"), "allow-list"),
    "a dunder method": (call("__reduce__", NODE_Z, op="call_method"), "allow-list"),
    "storage": (call("set_", NODE_Z, NODE_Z, op="call_method"), "allow-list"),
    "a dunder attribute": (call("builtins.getattr", NODE_Z, "__class__"), "public"),
    "a private attribute": (call("gradbox.field", NODE_Z, "_modules"), "public"),
    "an unlisted attribute": (call("builtins.getattr", NODE_Z, "grad_fn"), "allow-list"),
    "a computed attribute": (call("builtins.getattr", NODE_Z, NODE_Z), "public"),
    "getattr with a default": (call("builtins.getattr", NODE_Z, "T", 1), "a node and a name"),
    "an attribute of a literal": (call("builtins.getattr", "text", "T"), "a node and a name"),
    "a method of a literal": (call("sum", [1], op="call_method"), "first argument"),
    "out": (call("torch.add", NODE_Z, NODE_Z, out=NODE_Z), "out"),
    "out by position": (
        call("torch.nn.functional.normalize", NODE_Z, 2.0, 1, 1e-12, NODE_Z),
        "by position",
    ),
    "a norm that embeddings are written to": (
        call("torch.nn.functional.embedding", NODE_Z, NODE_Z, None, 1.0),
        "max_norm",
    ),
    "attention that drops entries": (
        call("torch.nn.functional.scaled_dot_product_attention", *[NODE_Z] * 3, dropout_p=0.5),
        "dropout_p",
    ),
    "attention that drops entries by position": (
        call("torch.nn.functional.scaled_dot_product_attention", *[NODE_Z] * 3, None, 0.5),
        "dropout_p",
    ),
    "attention that drops as many entries as it computes": (
        call("torch.nn.functional.multi_head_attention_forward", *[NODE_Z] * 13),
        "dropout_p",
    ),
    "a generator": (call("torch.ones", 2, generator=1), "generator"),
    "a device of its own": (call("torch.ones", 2, device="cuda:1"), "device"),
    "another device of its own": (call("to", NODE_Z, "cuda:1", op="call_method"), "device"),
    "a device by its number": (call("to", NODE_Z, 1, op="call_method"), "device"),
    "the processor": (call("cpu", NODE_Z, op="call_method"), "allow-list"),
    "an integer of 200 bits": (call("operator.add", NODE_Z, 2**200), "64 bits"),
    "a long string": (call("torch.einsum", "a" * 1000, NODE_Z), "1000 characters"),
    "a long list": (call("torch.zeros", [1] * 2000), "2000 entries"),
    "a deep list": (call("torch.zeros", nested(50)), "nested"),
    "a node that does not exist": (call("torch.exp", {"node": "nothing"}), "no earlier node"),
    "a cycle": (call("torch.exp", {"node": "x"}), "no earlier node"),
    "a node that is not a name": (call("torch.exp", {"node": ["z"]}), "no earlier node"),
    "an unknown tag": (call("torch.exp", {"pickle": "gASV"}), "no such argument"),
    "two tags": (call("torch.exp", {"node": "z", "tuple": []}), "one key"),
    "a wrong slice": (call("operator.getitem", NODE_Z, {"slice": [1]}), "slice"),
    "a slice of nothing": (call("operator.getitem", NODE_Z, {"slice": 3}), "list"),
    "an unknown dtype": (call("to", NODE_Z, {"dtype": "load"}, op="call_method"), "no such"),
    "a dict as an argument": (call("torch.exp", {"dict": []}), "only the output"),
    "a tensor that is not there": (
        {"op": "get_attr", "name": "x", "target": "weight"},
        "no tensor of that name",
    ),
    "a name twice": (call("torch.exp", NODE_Z, name="z"), "twice"),
    "a second output": (call("output", NODE_Z, op="output"), "one output"),
    "a grad mode that is computed": (call("torch.set_grad_enabled", NODE_Z), "true or false"),
    "a late argument": (call("torch.exp", NODE_Z), "come first"),
}


@pytest.mark.parametrize("attack", REFUSED_BEFORE)
def test_an_attack_is_refused_before_it_runs(attack: str) -> None:
    node, rule = REFUSED_BEFORE[attack]
    nodes = [node]
    if attack == "a late argument":
        nodes.append({"op": "placeholder", "name": "late", "target": "late"})
    graph = graph_of(*nodes)
    with pytest.raises(GraphRefused, match=rule) as caught:
        check_graph(graph, ())
    assert nodes[-1]["target"] in str(caught.value)
    with pytest.raises(GraphRefused):
        build(graph, {}, device="cpu")


def test_a_million_nodes_are_refused() -> None:
    nodes = [call("torch.exp", NODE_Z, name=f"x{index}") for index in range(5001)]
    with pytest.raises(ValidationError, match="5000"):
        graph_of(*nodes)


def test_many_values_in_many_lists_are_refused() -> None:
    long = [[0] * 1000] * 20
    nodes = [call("torch.zeros", long, name=f"x{index}") for index in range(10)]
    with pytest.raises(GraphRefused, match="100000 values"):
        check_graph(graph_of(*nodes), ())


@pytest.mark.parametrize(
    "body",
    [
        "{}",
        '{"nodes": []}',
        '{"nodes": [{"op": "exec", "name": "x", "target": "x"}]}',
        '{"nodes": [{"op": "output", "name": "a b", "target": "x"}]}',
        '{"nodes": [{"op": "output", "name": "x", "target": 3}]}',
        '{"nodes": [{"op": "output", "name": "x", "target": "x", "args": {}}]}',
        '{"nodes": [{"op": "output", "name": "x", "target": "x", "code": "1"}]}',
        '{"nodes": [{"op": "call_method", "name": "x", "target": "x", "kwargs": {"a b": 1}}]}',
        '{"nodes": ' + "[" * 10_000 + "]" * 10_000 + "}",
    ],
)
def test_malformed_json_is_not_a_graph(body: str) -> None:
    with pytest.raises(ValidationError):
        Graph.model_validate_json(body)


def test_a_number_that_json_lacks_is_refused() -> None:
    graph = Graph.model_validate_json(
        '{"nodes": [{"op": "output", "name": "o", "target": "o", "args": [NaN]}]}'
    )
    with pytest.raises(GraphRefused, match="not finite"):
        check_graph(graph, ())


REFUSED_WHILE_RUNNING = {
    "a list repeated": [call("operator.mul", [1], 10**9)],
    "a list repeated by a tensor": [call("operator.mul", [1], NODE_Z)],
    "10**10**10": [
        call("operator.pow", 10, 10, name="a"),
        call("operator.pow", 10, {"node": "a"}),
    ],
    "a power by repetition": [
        call("operator.pow", 2**62, 2, name="a"),
    ],
    "an in-place power": [call("operator.ipow", 9, 10**9)],
    "a shift": [call("operator.lshift", 1, 10**9)],
    "a formatted string": [call("operator.mod", "%1000000000d", 1)],
    "a list joined to itself": [
        call("operator.add", [1] * 1000, [1] * 1000),
    ],
    "an attribute of a size": [
        call("builtins.getattr", NODE_Z, "shape", name="a"),
        call("builtins.getattr", {"node": "a"}, "T"),
    ],
    "a method of a number": [
        call("operator.add", 1, 1, name="a"),
        call("exp", {"node": "a"}, op="call_method"),
    ],
    "an item of a dtype": [
        call("builtins.getattr", NODE_Z, "dtype", name="a"),
        call("operator.getitem", {"node": "a"}, 0),
    ],
    "a billion views": [
        call("expand", NODE_Z, 10**9, 2, 2, op="call_method", name="a"),
        call("torch.unbind", {"node": "a"}),
    ],
    "a billion pieces": [
        call("expand", NODE_Z, 10**9, 2, 2, op="call_method", name="a"),
        call("split", {"node": "a"}, 1, op="call_method"),
    ],
    "more pieces than samples": [call("torch.tensor_split", NODE_Z, 10**9)],
    "a terabyte": [call("torch.zeros", [10**6, 10**6])],
    "a terabyte from an expanded tensor": [
        call("expand", NODE_Z, 10**11, 2, 2, op="call_method", name="a"),
        call("torch.exp", {"node": "a"}),
    ],
    "a terabyte counted": [
        call("to", NODE_Z, {"dtype": "int64"}, op="call_method", name="a"),
        call("torch.flatten", {"node": "a"}, name="b"),
        call("torch.bincount", {"node": "b"}, minlength=10**12),
    ],
    "a terabyte of classes": [
        call("operator.add", NODE_Z, 10**12, name="c"),
        call("to", {"node": "c"}, {"dtype": "int64"}, op="call_method", name="a"),
        call("torch.nn.functional.one_hot", {"node": "a"}),
    ],
    "a terabyte repeated": [
        call("torch.full", [2], 10**12, name="a"),
        call("torch.repeat_interleave", NODE_Z, {"node": "a"}, dim=0),
    ],
    "a terabyte of bins": [call("torch.histc", NODE_Z, bins=10**12)],
    "a terabyte padded": [call("torch.nn.functional.pad", NODE_Z, [0, 10**12])],
    "a terabyte of all pairs of indices": [
        call("torch.zeros", [10**6], dtype={"dtype": "int64"}, name="a"),
        call("unsqueeze", {"node": "a"}, 1, op="call_method", name="b"),
        call("operator.getitem", NODE_Z, {"tuple": [{"node": "a"}, {"node": "b"}]}),
    ],
}


@pytest.mark.parametrize("attack", REFUSED_WHILE_RUNNING)
def test_an_attack_by_value_is_refused_where_it_happens(attack: str) -> None:
    function = build(graph_of(*REFUSED_WHILE_RUNNING[attack]), {}, device="cpu")
    with LIMIT.held(), pytest.raises((GraphRefused, MemoryError, RuntimeError)) as caught:
        function(torch.ones(2, 2))
    assert isinstance(caught.value, GraphRefused) or is_out_of_memory(caught.value)


def test_an_operation_that_this_torch_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(targets.FUNCTIONS, "torch.exp")
    with pytest.raises(GraphRefused, match="is allowed, but torch"):
        build(graph_of(call("torch.exp", NODE_Z)), {}, device="cpu")


def test_missing_and_unknown_arguments_are_refused() -> None:
    graph = graph_of(call("torch.exp", NODE_Z))
    check_graph(graph, (), positional=1, arguments=())
    with pytest.raises(GraphRefused, match="labels"):
        check_graph(graph, (), positional=1, arguments=["labels"])
    with pytest.raises(GraphRefused, match="takes 1"):
        check_graph(graph, (), positional=2)
    function = build(graph, {}, device="cpu")
    for args, kwargs in [((), {}), ((1, 2), {}), ((1,), {"z": 1}), ((1,), {"labels": 1})]:
        with pytest.raises(InvalidInputs, match="arguments are z"):
            function(*args, **kwargs)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.sampled_from([10**9, 2**62, 2**70, -(2**63)]),
    st.floats(-4, 4),
    st.sampled_from(["ij,jk->ik", "mean", "T", "shape", "sum", "__class__", "cpu"]),
)
REFERENCES = st.integers(0, 5).map(lambda index: {"node": "z" if index == 0 else f"x{index}"})
LITERALS = st.sampled_from(
    [{"dtype": "float64"}, {"device": "job"}, {"float": "nan"}, {"ellipsis": True}]
)
FORMS = st.recursive(
    st.one_of(SCALARS, REFERENCES, REFERENCES, LITERALS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(lambda items: {"tuple": items}),
        st.lists(inner, min_size=3, max_size=3).map(lambda items: {"slice": items}),
        st.dictionaries(st.sampled_from(["node", "tuple", "dtype", "x"]), inner, max_size=2),
    ),
    max_leaves=6,
)
TARGETS = st.one_of(
    st.sampled_from(sorted(allow_list.FUNCTIONS)).map(lambda name: ("call_function", name)),
    st.sampled_from(sorted(allow_list.OPERATORS)).map(lambda name: ("call_function", name)),
    st.sampled_from(sorted(allow_list.METHODS)).map(lambda name: ("call_method", name)),
    st.sampled_from(["os.system", "torch.load"]).map(lambda name: ("call_function", name)),
)
CALLS = st.tuples(TARGETS, st.lists(FORMS, max_size=3), st.booleans())
# What torch and Python raise on arguments that make no sense: the loss failed, and the job with it.
MODEL_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


ANY = settings(deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("num_inputs", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_whatever_comes_is_refused_or_computes(num_inputs: int) -> None:
    @settings(ANY, max_examples=num_inputs)
    @given(st.lists(CALLS, min_size=1, max_size=5))
    def holds(calls: list[Any]) -> None:
        nodes = [
            call(target, *([NODE_Z] if on_z else []), *args, name=f"x{index}", op=op)
            for index, ((op, target), args, on_z) in enumerate(calls, start=1)
        ]
        graph = graph_of(*nodes)
        try:
            function = build(graph, {}, device="cpu")
        except GraphRefused:
            return
        z = torch.ones(2, 2)
        try:
            with LIMIT.held():
                function(z)
        except (GraphRefused, *MODEL_ERRORS):
            pass
        assert torch.equal(z, torch.ones(2, 2))
        assert torch.is_grad_enabled()

    holds()
