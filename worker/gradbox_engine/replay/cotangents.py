"""L = g(Z, extras) and its cotangents z̄ = ∂L/∂Z: the only step that sees all shards at once.

Cost: one forward and one backward of g. Memory: Z, ∂L/∂Z and the graph of g.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradbox_engine.errors import BadInputs, LossNotFinite, LossNotScalar
from gradbox_engine.model.calling.blame import blaming
from gradbox_engine.model.calling.outputs import Outputs, as_z, describe, wide_leaves
from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.model.calling.shard_rng import begin_stream
from gradbox_engine.model.precision import accumulation_dtype
from gradbox_engine.model.weights import wide_dtype
from gradbox_engine.replay.z import ordered
from gradbox_engine.requests import Group, Objective, Z


@dataclass(frozen=True)
class LossDerivatives:
    """The loss and its derivatives.

    `cotangents` have the shards' order, `seen` and `seen_cotangents` that in which g saw Z. A
    cotangent is None where no path leads from the loss; a parameter's gradient is zero then, and
    its name in `unreached`.
    """

    loss: float
    cotangents: dict[str, dict[str, Tensor | None]]
    parameters: dict[str, Tensor]
    unreached: tuple[str, ...]
    seen: dict[str, Z]
    seen_cotangents: dict[str, Z]


def differentiate(
    objective: Objective,
    outputs: Mapping[str, Outputs],
    groups: Sequence[Group],
    *,
    device: torch.device,
    seed: int,
    widened: bool,
    penalty: float | None = None,
    called: str = "loss",
) -> LossDerivatives:
    """Evaluate g at Z and differentiate it there.

    The global generators stay where g leaves them; `prepared` puts them back.

    Args:
        outputs: by group, Z in the shards' order; g gets it in float32 or wider.
        penalty: what the shards' penalties add to L; None where there are none.
        widened: whether floating-point extras and parameters become float64 too.
        called: what messages call g.

    Raises:
        BadInputs: g is a constant, and there are no penalties.
        ModelCallFailed: g raised.
        LossNotScalar: g returned anything but one real floating-point number.
        LossNotFinite: that number is NaN or infinite.
    """
    leaves = {group: wide_leaves(named) for group, named in outputs.items()}
    arguments = {group: as_z(named) for group, named in outputs.items()} | {**objective.inputs}
    by_name = {group.name: group for group in groups}
    # Not a shard's stream: a loss that draws numbers gets the same ones in every run.
    begin_stream(seed, len(groups), 0)
    with (
        trainable(objective.parameters, widened=widened),
        blaming(f"the {called}", "objective", arguments=arguments),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        seen = {group: ordered(named, by_name[group]) for group, named in leaves.items()}
        inputs = {name: moved(v, device, widened=widened) for name, v in objective.inputs.items()}
        loss = _evaluate(objective, {group: as_z(named) for group, named in seen.items()}, inputs)
        value = finite_number(loss, penalty or 0.0, called=called)
        if penalty is None:
            refuse_constant(loss, called=called)
        flat = [z for named in leaves.values() for z in named.values()]
        gradients = iter(derivatives([loss], [*flat, *objective.parameters.values()]))
    cotangents = {g: {name: next(gradients) for name in named} for g, named in leaves.items()}
    parameters = dict(zip(objective.parameters, gradients, strict=True))
    return LossDerivatives(
        loss=value,
        cotangents=cotangents,
        parameters={
            name: _wide(torch.zeros_like(objective.parameters[name]) if g is None else g)
            for name, g in parameters.items()
        },
        unreached=tuple(name for name, gradient in parameters.items() if gradient is None),
        seen={g: as_z({n: z.detach() for n, z in named.items()}) for g, named in seen.items()},
        seen_cotangents={
            group: as_z(ordered(_filled(named, leaves[group]), by_name[group]))
            for group, named in cotangents.items()
        },
    )


def derivatives(
    outputs: Sequence[Tensor | None],
    leaves: Sequence[Tensor],
    cotangents: Sequence[Tensor | None] | None = None,
    *,
    create_graph: bool = False,
) -> list[Tensor | None]:
    """Return Σ ⟨cotangent, output⟩ differentiated by each leaf; None where no path leads.

    Args:
        cotangents: without them outputs are numbers; with them their graphs stay.
    """
    given = cotangents or [None] * len(outputs)
    moving = [
        (x, None if c is None else c.to(x.dtype))
        for x, c in zip(outputs, given, strict=True)
        if x is not None and x.requires_grad
    ]
    if not moving or not leaves:
        return [None] * len(leaves)
    roots, directions = zip(*moving, strict=True)
    keep = create_graph or cotangents is not None
    found = torch.autograd.grad(
        roots, leaves, directions, keep, create_graph=create_graph, allow_unused=True
    )
    return [None if gradient is None else gradient.to_dense() for gradient in found]


def _evaluate(objective: Objective, seen: dict[str, Z], inputs: dict[str, Any]) -> Any:
    if len(seen) == 1:
        return objective.function(*seen.values(), **inputs)
    return objective.function(**seen, **inputs)


def finite_number(value: Any, penalty: float = 0.0, *, called: str) -> float:
    """Return a function's value on the host, with what penalties add to it.

    Raises:
        LossNotScalar: it is not one real floating-point number.
        LossNotFinite: the sum is NaN or infinite.
    """
    number = float(real_number(value, called=called).detach())
    if not math.isfinite(number + penalty):
        of_penalties = f" and {penalty} from the penalties" if penalty else ""
        raise LossNotFinite(
            f"{called}: expected a finite number, got {number}{of_penalties}; look for a logarithm "
            f"or a division at zero, or for outputs of the model that are not finite"
        )
    return number + penalty


def real_number(value: Any, *, called: str) -> Tensor:
    """Return a function's value as it is, having checked its dtype and size alone.

    Raises:
        LossNotScalar: it is not one real floating-point number.
    """
    if isinstance(value, Tensor) and value.is_floating_point() and value.numel() == 1:
        return value
    raise LossNotScalar(
        f"{called}: expected a tensor with one real floating-point entry, got {describe(value)}; "
        f"reduce it, by .mean() or .sum()"
    )


def refuse_constant(value: Tensor, *, called: str) -> None:
    """Check that a function's value has a graph, as `backward` does.

    Raises:
        BadInputs: it depends neither on outputs of the model nor on anything else that is trained.
    """
    if not value.requires_grad:
        raise BadInputs(
            f"{called}: expected numbers that can be differentiated by the model's outputs, got a "
            f"constant: detach(), argmax, comparisons, integers and torch.no_grad() cut the path; "
            f"compute it from the outputs by functions that have a derivative"
        )


def _filled(named: Mapping[str, Tensor | None], like: Outputs) -> Outputs:
    return {n: torch.zeros_like(like[n]) if c is None else c for n, c in named.items()}


def moved(value: Any, device: torch.device, *, widened: bool) -> Any:
    """Return an extra on the device, in float64 if asked and if it is floating-point."""
    if not isinstance(value, Tensor):
        return value
    return value.to(device, wide_dtype(value.dtype) if widened else value.dtype)


def _wide(gradient: Tensor) -> Tensor:
    return gradient.to(accumulation_dtype(gradient.dtype))


def nonzero(cotangents: Mapping[Position, Outputs]) -> dict[Position, Outputs]:
    """Return the cotangents that are not zero, and one in each group that has only zeros.

    A shard whose cotangent is zero needs no backward pass. The one in each group tells the
    parameters that the loss reaches from those that it does not. Waits for the device once.
    """
    given = {position: part for position, part in cotangents.items() if part}
    flags = [(position, c.any()) for position, part in given.items() for c in part.values()]
    on_host = torch.stack([flag for _, flag in flags]).tolist() if flags else []
    chosen = {position for (position, _), flag in zip(flags, on_host, strict=True) if flag}
    for group in {position.group for position in given}:
        members = [position for position in given if position.group == group]
        if not chosen.intersection(members):
            chosen.add(members[-1])
    return {position: part for position, part in given.items() if position in chosen}


@contextmanager
def trainable(parameters: Mapping[str, Tensor], *, widened: bool) -> Iterator[None]:
    """Let the loss's own leaves require grad, and be float64 if asked, until this ends."""
    before = [(leaf, leaf.detach(), leaf.requires_grad) for leaf in parameters.values()]
    try:
        for leaf in parameters.values():
            leaf.requires_grad_()
            if widened:
                leaf.data = leaf.detach().to(wide_dtype(leaf.dtype))
        yield
    finally:
        for leaf, data, requires_grad in before:
            leaf.data = data
            leaf.requires_grad_(requires_grad)
