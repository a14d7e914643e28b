"""Losses, which are graphs that a stranger wrote: they run nothing and reach nothing else.

The tables of tests/graphs are tried here on a whole box: a graph is refused when it is posted, or
its job fails; and the device process, with everybody's models in it, is the same afterwards.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence
from functools import partial
from typing import Any

from proofs.attacks.attack import attack
from proofs.attacks.target import NODE_Z, Target, graph_loss, refused
from tests.graphs.test_kernels import PREPARED, TRUSTING
from tests.graphs.test_refused import REFUSED_BEFORE, REFUSED_WHILE_RUNNING

GIB = 2**30
# Errors that a loss may end with: refused, or failed as it would have failed at home.
AT_RUN = (
    "graph-refused",
    "model-call-failed",
    "loss-not-scalar",
    "invalid-inputs",
    "out-of-memory",
)


def call(target: str, *args: Any, name: str, op: str = "call_function", **kwargs: Any) -> Any:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def _ended_with(target: Target, codes: Sequence[str], **changes: Any) -> None:
    """Post a job that must fail with one of some codes, on a device that outlives it."""
    before = target.devices()
    view = target.ended(target.eve, target.job(target.eve, **changes))
    assert view["state"] == "failed", view
    code = view["error"]["type"].rpartition(":")[2]
    assert code in codes, view["error"]
    assert target.devices() == before, "the device process ended with the job"


def _refused_when_posted(target: Target, nodes: Sequence[Any]) -> None:
    refused(target.post(target.eve, loss=graph_loss(*nodes)), "graph-refused")


def _refused_at_run(target: Target, nodes: Sequence[Any]) -> None:
    total = call("sum", {"node": nodes[-1]["name"]}, name="total", op="call_method")
    _ended_with(target, AT_RUN, loss=graph_loss(*nodes, total))


for _name, (_node, _rule) in REFUSED_BEFORE.items():
    _late = {"op": "placeholder", "name": "late", "target": "late"}
    attack(
        f"graph: {_name}",
        tries=f"a loss whose node calls {_node['target']}",
        must="422 graph-refused when it is posted",
    )(
        partial(
            _refused_when_posted,
            nodes=[_node, _late] if _name == "a late argument" else [_node],
        )
    )

for _name, _nodes in REFUSED_WHILE_RUNNING.items():
    attack(
        f"graph at run: {_name}",
        tries=f"a loss that {_nodes[-1]['target']} would make unbearable",
        must="the job fails before anything of it is allocated; the device lives",
    )(partial(_refused_at_run, nodes=_nodes))


def _believed(target: Target, values: Any, node: Any) -> None:
    import torch

    blob = target.upload(target.eve, {"t": torch.tensor(values)})
    total = call("sum", {"node": node["name"]}, name="total", op="call_method")
    _ended_with(
        target,
        AT_RUN,
        loss=graph_loss(*PREPARED, node, total),
        loss_inputs={"t": {"blob": blob, "tensor": "t"}},
    )


for _name, (_values, _node) in TRUSTING.items():
    attack(
        f"kernel: {_name}",
        tries=f"{_node['target']} with a value that its kernel does not check",
        must="the job fails; no memory of others is read or written; the device lives",
    )(partial(_believed, values=_values, node=_node))


# --- memory that kernels and backward passes take inside -----------------------------------------

# 4 GB each of float32: what the kernel copies out of a view of a few bytes.
_WIDE = call("expand", NODE_Z, 2**29, 2, 2, op="call_method", name="wide")
_LONG = call("torch.reshape", NODE_Z, [4], name="four")
_FIRST = call("operator.getitem", {"node": "four"}, 0, name="one")
_LINE = call("expand", {"node": "one"}, 2**30, op="call_method", name="wide")
HIDDEN = {
    "kthvalue": [_LONG, _FIRST, _LINE, call("torch.kthvalue", {"node": "wide"}, 1, name="k")],
    "median": [_LONG, _FIRST, _LINE, call("torch.median", {"node": "wide"}, name="k")],
    "mv": [
        _LONG,
        call("operator.getitem", {"node": "four"}, {"slice": [0, 1, None]}, name="v"),
        call("expand", {"node": "v"}, 2**30, 1, op="call_method", name="m"),
        call("torch.mv", {"node": "m"}, {"node": "v"}, name="wide"),
        call("operator.getitem", {"node": "wide"}, 0, name="k"),
    ],
    "conv1d": [
        _LONG,
        _FIRST,
        call("expand", {"node": "one"}, 1, 1, 2**30, op="call_method", name="wide"),
        call("expand", {"node": "one"}, 1, 1, 1, op="call_method", name="weight"),
        call("torch.nn.functional.conv1d", {"node": "wide"}, {"node": "weight"}, name="c"),
        call("operator.getitem", {"node": "c"}, {"tuple": [0, 0, 0]}, name="k"),
    ],
    "backward of an expanded tensor": [
        _LONG,
        _FIRST,
        _LINE,
        call("operator.getitem", {"node": "wide"}, 0, name="k"),
    ],
}


def _hidden_memory(target: Target, nodes: Sequence[Any]) -> None:
    """Run the loss on a device that may take 1.5 GB more than it has, as if that were all."""
    (device,) = target.devices().values()
    size = _virtual_bytes(device)
    none = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    last = nodes[-1]
    if last["target"] in ("torch.kthvalue",):
        nodes = [*nodes, call("operator.getitem", {"node": "k"}, 0, name="value")]
    total = call("sum", {"node": nodes[-1]["name"]}, name="total", op="call_method")
    limit = size + 3 * GIB // 2
    resource.prlimit(device, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        _ended_with(target, ("graph-refused", "out-of-memory"), loss=graph_loss(*nodes, total))
    finally:
        resource.prlimit(device, resource.RLIMIT_AS, none)
    target.still_works()


def _virtual_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


for _name, _nodes in HIDDEN.items():
    attack(
        f"memory: {_name}",
        tries="4 GB that the kernel takes and no tensor of the graph shows, where 1.5 GB are left",
        must="graph-refused or out-of-memory; the device and its models live",
    )(partial(_hidden_memory, nodes=_nodes))


@attack(
    "graph: computes for ever",
    tries="4,000 products of matrices that fit the memory, with a limit of 2 s",
    must="job-timed-out within the limit, its grace and a little; the next job runs",
    slow=True,
)
def _computes_for_ever(target: Target) -> None:
    nodes = [call("torch.ones", [1500, 1500], name="m0")]
    nodes += [
        call("torch.matmul", {"node": "m0"}, {"node": f"m{index}"}, name=f"m{index + 1}")
        for index in range(4000)
    ]
    total = call("sum", {"node": "m4000"}, name="t", op="call_method")
    z = call("sum", NODE_Z, op="call_method", name="zs")
    both = call("operator.add", {"node": "t"}, {"node": "zs"}, name="total")
    job = target.job(target.eve, loss=graph_loss(*nodes, total, z, both), timeout_s=2.0)
    view = target.ended(target.eve, job, within_s=30.0)
    assert view["state"] == "failed", view
    assert view["error"]["type"].endswith("job-timed-out"), view
    target.still_works()
