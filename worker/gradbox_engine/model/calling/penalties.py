"""Eager penalties: L + Σᵢ weight · loss(tapᵢ), without the memory that adding them to L would take.

The first pass takes a penalty's value where its tap is, and keeps no graph of it. In the backward
pass, when the cotangent of a tap is complete, the penalty is evaluated once more on the tap's
values, differentiated there and then, and its gradient joins the cotangent:

    ∂L/∂tap = (cotangent from z) + s_b · weight · ∂loss/∂tap

Its graph is freed before the next layer's backward pass, so the peak is that of the largest
penalty, not of their sum. s_b = per_sample_scale(zᵢ)_b multiplies the rows of sample b; it is a
constant in the differentiation, and no part of the value.

A tap that the model overwrites in place (a normalisation before `ReLU(inplace=True)`) has to be
copied to be there in the backward pass. Its version tells, at the end of a call: that call's graph
is not used, and from then on the penalty's taps are copied.

Cost: two forwards and one backward of each penalty for every shard; the memory of a tap that the
model does not itself save for its backward pass, such as the input of a ReLU. Not supported:
parameters of the penalty's own, which are held constant. Not noticed: a tap overwritten through
`.data`, which leaves no trace in its version.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from gradbox_engine.errors import BadOutput, BadPenalty
from gradbox_engine.model.calling.blame import blaming
from gradbox_engine.model.calling.outputs import Outputs, as_z, choose, describe
from gradbox_engine.model.precision import accumulation_dtype
from gradbox_engine.requests import Penalty
from gradbox_engine.torch_private import hooks_on_gradient, version_of

AT = re.compile(r"(?P<module>[^\[\]]*)(?P<elements>(\[[^\[\]]+\])*)")


class Tap:
    """One activation of one shard under a penalty, from the forward to the backward pass."""

    def __init__(self, index: int, penalty: Penalty, activation: Tensor, *, copied: bool) -> None:
        self.index = index
        self._penalty = penalty
        value = activation.detach()
        self._value = value.clone() if copied else value
        self._version = version_of(self._value)
        self._z: Outputs | None = None  # until the backward pass from z
        self._factor = 1.0
        if activation.requires_grad:
            activation.register_hook(self._add_gradient)  # type: ignore[no-untyped-call]
            # Before hooks of the model's own, which the penalty's gradient passes through as well.
            # autograd runs them in the order of insertion, which `move_to_end` does not change.
            hooks: Any = hooks_on_gradient(activation)
            *earlier, own = hooks.items()
            hooks.clear()
            hooks.update([own, *earlier])

    @property
    def overwritten(self) -> bool:
        """Whether the model has changed the activation in place."""
        return version_of(self._value) != self._version

    def value(self) -> Tensor:
        """Return weight · loss(tap), 0-dim, by the kernels that a graph would use, without one."""
        with saved_tensors_hooks(lambda _tensor: None, lambda saved: saved):
            return _evaluate(self._penalty, _leaf(self._value)).detach()

    def start(self, z: Outputs, factor: float) -> Tensor:
        """Make ready for the backward pass; return the zeros with which it starts at this tap.

        They make it reach the tap also where no path leads there from z.

        Args:
            z: the shard's outputs.
            factor: what the cotangents are scaled by.
        """
        self._z = {n: t.detach().to(accumulation_dtype(t.dtype)) for n, t in z.items()}
        self._factor = factor
        return self._value.new_zeros(()).expand(self._value.shape)

    def _add_gradient(self, cotangent: Tensor) -> Tensor:
        if self._z is None:  # the model differentiates in its forward pass, and L is not in that
            return cotangent
        with blaming("its loss", f"penalty at {self._penalty.at!r}"):
            leaf = _leaf(self._value)
            with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                value = _evaluate(self._penalty, leaf)
            if not value.requires_grad:
                return cotangent
            (gradient,) = torch.autograd.grad(value, leaf, materialize_grads=True)
            return cotangent + (self._scaled(gradient, self._z) * self._factor).to(cotangent.dtype)

    def _scaled(self, gradient: Tensor, z: Outputs) -> Tensor:
        if self._penalty.per_sample_scale is None:
            return gradient
        with torch.no_grad():
            scale_b = self._penalty.per_sample_scale(as_z(z))
        num_samples = gradient.shape[0] if gradient.ndim else 0
        if not isinstance(scale_b, Tensor) or scale_b.shape != (num_samples,):
            raise BadPenalty(
                f"penalty at {self._penalty.at!r}: expected a per-sample scale of shape "
                f"({num_samples},), the tap's dim 0, got {describe(scale_b)}"
            )
        scale_b = scale_b.to(gradient.device)
        return gradient * scale_b.view(-1, *[1] * (gradient.ndim - 1))


class Tapped:
    """The taps of one call in the order of the call, and their values where they are wanted.

    An edge is the tap's place in the graph, None where nothing below requires grad. The graph's
    hooks hold the taps, so these do not hold the edges: such a cycle would never be freed.

    As a context it removes the forward hooks that collect them, at the end of the call.
    """

    def __init__(self, *, with_values: bool) -> None:
        self.with_values = with_values
        self.taps: list[tuple[Tap, GradientEdge | None]] = []
        self.values: list[Tensor] = []
        self.hooks: list[RemovableHandle] = []

    def __enter__(self) -> Tapped:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()


class Taps:
    """Hooks on the submodules whose outputs are penalised."""

    def __init__(self, model: nn.Module, penalties: Sequence[Penalty]) -> None:
        """Find the submodules.

        Raises:
            BadPenalty: there is no submodule of that name.
        """
        self._penalties = penalties
        self._sites = [_site(model, penalty) for penalty in penalties]
        self._copied: set[int] = set()

    def hooked(self, *, with_values: bool) -> Tapped:
        """Register forward hooks that collect the taps, until the context ends that this is."""
        tapped = Tapped(with_values=with_values)
        for index, (module, element) in enumerate(self._sites):
            hook = partial(self._tap, index, element, tapped)
            tapped.hooks.append(module.register_forward_hook(hook))
        return tapped

    def all_intact(self, tapped: Tapped) -> bool:
        """Return whether the taps of a finished call still have their values.

        Those that do not are copied from now on.
        """
        overwritten = {tap.index for tap, _ in tapped.taps if tap.overwritten}
        self._copied |= overwritten
        return not overwritten

    def _tap(
        self,
        index: int,
        element: str | int | None,
        tapped: Tapped,
        _module: nn.Module,
        _inputs: Any,
        output: Any,
    ) -> Any:
        """Tap one call of a submodule; return its output, or what is to stand in its place."""
        penalty = self._penalties[index]
        if not torch.is_grad_enabled():
            raise BadPenalty(
                f"penalty at {penalty.at!r}: expected the submodule to run with gradients enabled, "
                f"got a call under torch.no_grad(), where the penalty would have a value and no "
                f"gradient; if a checkpoint does that, give it use_reentrant=False"
            )
        try:
            activation = choose(output, element)
        except BadOutput as error:
            raise BadPenalty(f"penalty at {penalty.at!r}: {error}") from None
        if not isinstance(activation, Tensor) or not activation.is_floating_point():
            raise BadPenalty(
                f"penalty at {penalty.at!r}: expected a floating-point tensor, got "
                f'{describe(activation)}; name an element of it, as in "{penalty.at}[0]"'
            )
        if activation.is_leaf and activation.requires_grad:
            # Shared by all calls: a hook registered on it for one shard would run in every other.
            if activation is not output:
                raise BadPenalty(
                    f"penalty at {penalty.at!r}: expected an activation, got a parameter or an "
                    f"input inside of {describe(output)}; tap a submodule that returns it alone"
                )
            output = activation = activation.view_as(activation)
        tap = Tap(index, penalty, activation, copied=index in self._copied)
        edge = get_gradient_edge(activation) if activation.requires_grad else None
        tapped.taps.append((tap, edge))
        if tapped.with_values:
            tapped.values.append(tap.value())
        return output


def _evaluate(penalty: Penalty, leaf: Tensor) -> Tensor:
    with (
        blaming("its loss", f"penalty at {penalty.at!r}"),
        torch.enable_grad(),
        torch.autocast(leaf.device.type, enabled=False),
    ):
        value = penalty.loss(leaf)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise BadPenalty(
                f"penalty at {penalty.at!r}: expected its loss to return one number, got "
                f"{describe(value)}"
            )
        return value.sum() * penalty.weight


def _leaf(value: Tensor) -> Tensor:
    return value.detach().to(accumulation_dtype(value.dtype)).requires_grad_()


def _site(model: nn.Module, penalty: Penalty) -> tuple[nn.Module, str | int | None]:
    parsed = AT.fullmatch(penalty.at)
    name = penalty.at if parsed is None else parsed["module"]
    modules = dict(model.named_modules(remove_duplicate=False))
    if parsed is None or name not in modules:
        raise BadPenalty(
            f"penalty at {penalty.at!r}: expected the name of a submodule, or NAME[ELEMENT], got "
            f"{name!r}; there are {', '.join(map(repr, list(modules)[1:5]))}, …"
        )
    element = parsed["elements"][1:-1].replace("][", ".")
    return modules[name], int(element) if element.lstrip("-").isdigit() else element or None
