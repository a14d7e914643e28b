"""Answers to `tests.cases`, by the code one would write first: all graphs alive, on DEVICE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradbox_engine import shard_stream
from tests.cases import Case, Shards
from tests.device import DEVICE, moved, native_recurrence, tolerance

TOLERANCE = tolerance(torch.float64)
"""Largest relative difference in float64 between two ways to add up the same gradient."""


@dataclass(frozen=True)
class Answer:
    """What a case's job has to return. `unreached` are those of `grads` that are zero for good."""

    loss: float
    grads: dict[str, Tensor]
    unreached: set[str]
    buffers: dict[str, Tensor]
    outputs: dict[str, Any]
    input_grads: dict[tuple[str, int, str], Tensor]  # by group, shard and argument


def naive(case: Case) -> Answer:
    """Answer a case by one backward pass through the graphs of all shards."""
    groups, inputs = _with_leaves(case)
    case = replace(case, groups=groups, loss_inputs=moved(case.loss_inputs))
    model, wanted, outputs = _forward(case)
    loss = _loss(case, outputs)
    leaves = wanted | case.loss_parameters
    wanted_leaves = [*leaves.values(), *inputs.values()]
    found = iter(torch.autograd.grad(loss, wanted_leaves, allow_unused=True))
    named = {name: next(found) for name in leaves}
    return Answer(
        loss=loss.item(),
        grads={n: torch.zeros_like(leaves[n]) if g is None else g for n, g in named.items()},
        unreached={name for name, gradient in named.items() if gradient is None},
        buffers={name: buffer.detach() for name, buffer in model.named_buffers()},
        outputs=outputs,
        input_grads={
            place: torch.zeros_like(leaf) if gradient is None else gradient
            for (place, leaf), gradient in zip(inputs.items(), found, strict=True)
        },
    )


def curvature_products(
    case: Case, vectors: Mapping[str, Tensor], *, kind: str = "hessian"
) -> dict[str, Tensor]:
    """Multiply vectors with the curvature of a case's loss, with the graphs of all shards alive.

    The Hessian by double backward through everything, the Gauss-Newton matrix as Jᵀ (∇²g) J of
    dense matrices. Fused attention cannot be differentiated twice, so this too runs without it.
    """
    case = replace(
        case,
        groups={n: [moved(shard) for shard in shards] for n, shards in case.groups.items()},
        loss_inputs=moved(case.loss_inputs),
    )
    with sdpa_kernel(SDPBackend.MATH):
        _, wanted, outputs = _forward(case)
    parameters = list(wanted.values())
    v_VP = torch.cat([vectors[name].to(DEVICE).flatten(1) for name in wanted], 1)
    if kind == "hessian":
        first_P = _flat(_loss(case, outputs), parameters, create_graph=True)
        rows = [_flat(first_P @ v_P, parameters) for v_P in v_VP]
    else:
        leaves = {group: z.detach().requires_grad_() for group, z in outputs.items()}
        first_Z = _flat(_loss(case, leaves), list(leaves.values()), create_graph=True)
        bent_ZZ = torch.stack([_flat(entry, list(leaves.values())) for entry in first_Z])
        flat_Z = torch.cat([z.flatten() for z in outputs.values()])
        jacobian_ZP = torch.stack([_flat(entry, parameters) for entry in flat_Z])
        rows = list(v_VP @ jacobian_ZP.T @ bent_ZZ @ jacobian_ZP)
    parts = torch.split(torch.stack(rows), [p.numel() for p in parameters], 1)
    return {n: x.view(-1, *wanted[n].shape) for n, x in zip(wanted, parts, strict=True)}


def _flat(value: Tensor, leaves: list[Any], **how: Any) -> Tensor:
    """Return a number's gradient by all leaves in one row."""
    if not value.requires_grad:
        return torch.cat([torch.zeros_like(leaf).flatten() for leaf in leaves])
    found = torch.autograd.grad(value, leaves, allow_unused=True, retain_graph=True, **how)
    pairs = zip(found, leaves, strict=True)
    return torch.cat([(torch.zeros_like(x) if g is None else g).flatten() for g, x in pairs])


def _forward(case: Case) -> tuple[nn.Module, dict[str, nn.Parameter], dict[str, Any]]:
    """Return the model, what is differentiated by, and Z of each group with its graph."""
    model = case.model().to(DEVICE).train(case.mode == "train")
    wanted = wanted_parameters(model, case)
    for parameter in wanted.values():
        parameter.requires_grad_()
    with torch.enable_grad(), native_recurrence():
        return model, wanted, {name: _outputs(model, case, name) for name in case.groups}


def _loss(case: Case, outputs: Mapping[str, Any]) -> Tensor:
    with torch.enable_grad():
        if outputs.keys() == {"z"}:
            return case.loss(outputs["z"], **case.loss_inputs)
        return case.loss(**outputs, **case.loss_inputs)


def difference(grads: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest ‖a − b‖ / ‖b‖ over the tensors; infinite where the names differ.

    A tensor whose norm is below a thousandth of the largest one is measured by that thousandth:
    the bias before a batch norm has no gradient, only rounding.
    """
    if grads.keys() != expected.keys():
        return float("inf")
    floor = max(float(b.norm()) for b in expected.values()) / 1000
    worst = 0.0
    for name, b in expected.items():
        a = grads[name].to(b)
        if a.shape != b.shape:
            return float("inf")
        error = float((a - b).norm()) / max(float(b.norm()), floor, 1e-300)
        worst = max(worst, error if error == error else float("inf"))
    return worst


def _with_leaves(
    case: Case,
) -> tuple[dict[str, Shards], dict[tuple[str, int, str], Tensor]]:
    """Return the case's shards with leaves for floating-point arguments, and those leaves."""
    groups: dict[str, Shards] = {}
    leaves: dict[tuple[str, int, str], Tensor] = {}
    for group, shards in case.groups.items():
        groups[group] = [moved(shard) for shard in shards]
        for index, shard in enumerate(groups[group]):
            for name, value in shard.items():
                if value.is_floating_point():
                    shard[name] = leaves[group, index, name] = value.clone().requires_grad_()
    return groups, leaves


def wanted_parameters(model: nn.Module, case: Case) -> dict[str, nn.Parameter]:
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point()
        and (case.wrt is None or any(fnmatchcase(name, pattern) for pattern in case.wrt))
    }


def _outputs(model: nn.Module, case: Case, group: str) -> Any:
    zs = []
    for shard, arguments in enumerate(case.groups[group]):
        with shard_stream(case.seed, list(case.groups).index(group), shard):
            zs.append(_call(model, case, group, arguments))
    if isinstance(zs[0], dict):
        return {name: torch.cat([z[name] for z in zs]) for name in zs[0]}
    return torch.stack(zs) if zs[0].ndim == 0 else torch.cat(zs)


def _call(model: nn.Module, case: Case, group: str, arguments: dict[str, Tensor]) -> Any:
    method = case.methods.get(group, "forward")
    entry = model if method == "forward" else getattr(model, method)
    places = [value for name, value in arguments.items() if name.isdigit()]
    value = entry(*places, **{n: v for n, v in arguments.items() if not n.isdigit()})
    if case.output is not None:
        for step in str(case.output).split("."):
            value = value[int(step)] if step.isdigit() else value[step]
    return value if case.readout is None else case.readout(value, arguments)
