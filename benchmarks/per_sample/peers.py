"""Other ways to the same arrays: the loop, torch.func, ExpandedWeights, Opacus, BackPACK.

Each gives name → (B, *shape), or (B, Y, *shape) of a Jacobian, in memory of its own. torch.func
vectorises models of transformers with eager attention alone, and is given that. The last two
are measured where they are installed: `pip install -e '.[bench,peers]'`.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap

from benchmarks.per_sample.workloads import Workload, called

Arrays = dict[str, Tensor]


def peers() -> dict[str, Callable[[Workload], Callable[[], Arrays]]]:
    """Return how to build the calls of the peers that are installed, by name."""
    found: dict[str, Callable[[Workload], Callable[[], Arrays]]] = {
        "loop": lambda work: lambda: _loop(work),
        "vmap": _vmapped,
        "ExpandedWeights": _expanded,
    }
    if importlib.util.find_spec("opacus") is not None:
        found["Opacus"] = _opacus
    if importlib.util.find_spec("backpack") is not None:
        found["BackPACK"] = _backpack
    return found


def wrong_shape(work: Workload, arrays: Arrays) -> str | None:
    """Return the name of an array that has not one row a sample and output, if there is one."""
    samples = len(next(iter(work.shard.values())))
    lead = (samples, work.outputs) if work.outputs > 1 else (samples,)
    for name, parameter in work.model.named_parameters():
        if name not in arrays or arrays[name].shape != (*lead, *parameter.shape):
            return name
    return None


def _loop(work: Workload) -> Arrays:
    parameters = dict(work.model.named_parameters())
    rows: list[list[tuple[Tensor, ...]]] = []
    for sample in range(len(next(iter(work.shard.values())))):
        arguments = {name: x[sample : sample + 1] for name, x in work.shard.items()}
        z = called(work, work.model, arguments)
        values = z.flatten() if work.outputs > 1 else work.loss(z)
        rows.append(
            [
                torch.autograd.grad(
                    value, list(parameters.values()), retain_graph=True, materialize_grads=True
                )
                for value in values
            ]
        )
    found = {}
    for index, name in enumerate(parameters):
        stacked = torch.stack([torch.stack([row[index] for row in of_b]) for of_b in rows])
        found[name] = stacked if work.outputs > 1 else stacked[:, 0]
    return found


def _vmapped(work: Workload) -> Callable[[], Arrays]:
    model: Any = work.model
    if hasattr(model, "set_attn_implementation"):  # fused kernels' masks branch on values
        model = copy.deepcopy(model)
        model.set_attn_implementation("eager")
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def one(weights: Arrays, arguments: dict[str, Any]) -> Tensor:
        batch = {name: x.unsqueeze(0) for name, x in arguments.items()}
        z = called(work, lambda *a, **k: functional_call(model, weights, a, k), batch)
        return z.flatten() if work.outputs > 1 else work.loss(z)[0]

    derivative = jacrev(one) if work.outputs > 1 else grad(one)
    rows = vmap(derivative, in_dims=(None, 0), randomness="error")
    return lambda: rows(parameters, work.shard)


def _expanded(work: Workload) -> Callable[[], Arrays]:
    from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

    model = copy.deepcopy(work.model)

    def run() -> Arrays:
        wrapped = call_for_per_sample_grads(model, loss_reduction="sum", batch_first=True)
        return _stacked(model, "grad_sample", _backward(work, wrapped))

    return run


def _opacus(work: Workload) -> Callable[[], Arrays]:
    from opacus.grad_sample import GradSampleModule

    # Its hooks see nothing in eval mode; dropout is off all the same.
    model = _out_of_place(work.model).train()
    wrapped: Any = None

    def run() -> Arrays:
        nonlocal wrapped
        if wrapped is None:
            wrapped = GradSampleModule(model, batch_first=True, loss_reduction="sum")
        return _stacked(model, "grad_sample", _backward(work, wrapped))

    return run


def _backpack(work: Workload) -> Callable[[], Arrays]:
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad

    model: Any = None

    def run() -> Arrays:
        nonlocal model
        if model is None:
            model = extend(_out_of_place(work.model))
        with backpack(BatchGrad()):
            return _stacked(model, "grad_batch", _backward(work, model))

    return run


def _out_of_place(model: nn.Module) -> nn.Module:
    """Return a copy as peers with hooks on modules need it, which computes the same."""
    found = copy.deepcopy(model)
    for module in found.modules():
        if hasattr(module, "inplace"):
            vars(module)["inplace"] = False
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return found


def _backward(work: Workload, model: Callable[..., Any]) -> Iterator[None]:
    """Go forward and backward once for a gradient, once for each output of a Jacobian."""
    for output in range(work.outputs):
        z = called(work, model, work.shard)
        value = z.flatten(1)[:, output] if work.outputs > 1 else work.loss(z)
        value.sum().backward()
        yield


def _stacked(model: Any, attribute: str, passes: Iterator[None]) -> Arrays:
    """Take each parameter's per-sample gradient after every pass, and put the passes together."""
    taken: dict[str, list[Tensor]] = {}
    for _ in passes:
        for name, parameter in model.named_parameters():
            taken.setdefault(name, []).append(getattr(parameter, attribute))
            setattr(parameter, attribute, None)
            parameter.grad = None
    return {
        name: arrays[0] if len(arrays) == 1 else torch.stack(arrays, 1)
        for name, arrays in taken.items()
    }
