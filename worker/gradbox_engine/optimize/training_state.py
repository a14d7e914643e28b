"""The state of a run on its device, and one step of it.

    g_n   = clip(dL_n/dθ)                    L_n the loss of step n, θ as step n - 1 left it
    θ, m  = optimizer(θ, m, g_n; lr_n)       m the optimizer's moments

State n is a function of state 0 and the gradients of steps 1 … n alone: nothing is drawn, timed, or
left to the order of threads. So a run that lost its state is computed again, to the last bit where
the gradients are.

A parameter in 16 bits has a float32 master, which is what is trained: an update of less than half a
unit in the last place would be lost in bf16 (Micikevicius et al., Mixed precision training, 2018,
section 3.1). The model is given the master rounded.

A parameter that the loss does not reach is left out of the update, as where `loss.backward()`
leaves its `.grad` None: no decay of weights, no change of moments.

Memory: the trained parameters once, their moments (none to two), gradients while a step ends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from gradbox_engine.errors import BadOptimizer, BadWeights, GradientNotFinite
from gradbox_engine.optimize.optimizers import OptimizerChoice

NARROW: Final = (torch.bfloat16, torch.float16)
WEIGHTS: Final = "weights"
BUFFERS: Final = "buffers"
MOMENTS: Final = "moments"


@dataclass(frozen=True)
class Updated:
    """What a step did: `grad_norm` is ‖dL/dθ‖₂ over all that is trained, before it was clipped."""

    step: int
    grad_norm: float


class TrainingState:
    """The trained parameters, their moments, the model's buffers, and how many steps were made.

    `step` changes it in place. After an error that it does not name, the state is to be dropped.
    """

    def __init__(self, parameters: Mapping[str, Tensor], optimizer: OptimizerChoice) -> None:
        """Begin at step 0, with copies of the parameters.

        Raises:
            BadOptimizer: there is no such optimizer, or it refuses its options or a parameter.
        """
        self.num_steps = 0
        self.buffers: dict[str, Tensor] = {}  # of the model, as the last step left them
        self._choice = optimizer
        self._masters: dict[str, nn.Parameter] = {}
        self._rounded: dict[str, Tensor] = {}  # what the model is given for a float32 master
        self._optimizer = optimizer.build(self._adopted(parameters))

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """θ by name, in the dtypes of the model. They change with every step: copy what is kept."""
        return {name: self._rounded.get(name, p.detach()) for name, p in self._masters.items()}

    @property
    def masters(self) -> Mapping[str, Tensor]:
        """θ by name, in the dtypes in which it is trained."""
        return {name: p.detach() for name, p in self._masters.items()}

    @property
    def rates(self) -> list[float]:
        """The learning rates of the optimizer's groups, that of the rest behind them."""
        return [group["lr"] for group in self._optimizer.param_groups]

    @property
    def num_bytes(self) -> int:
        """What it takes on its device."""
        moments = [value for _, value in self._moments()]
        held = [*self._masters.values(), *self._rounded.values(), *self.buffers.values(), *moments]
        return sum(tensor.nbytes for tensor in held)

    def check_groups(self, more: Collection[str]) -> None:
        """Check that each group of the optimizer has a parameter; see `OptimizerChoice`.

        Args:
            more: names of what is to be adopted.

        Raises:
            BadOptimizer: one has none.
        """
        self._choice.check_groups([*self._masters, *more])

    def alike(self, parameters: Mapping[str, Tensor]) -> TrainingState:
        """Return the state of a run of the same optimizer at step 0, of these parameters."""
        return TrainingState(parameters, self._choice)

    def adopt(self, parameters: Mapping[str, Tensor]) -> None:
        """Train these as well from now on: those of a loss, when it first comes.

        Raises:
            BadOptimizer: the optimizer refuses one of them.
        """
        if not parameters:
            return
        before = self._optimizer
        self._adopted(parameters)
        self._optimizer = self._choice.build(self._masters)
        self._optimizer.state.update(before.state)
        for group, old in zip(self._optimizer.param_groups, before.param_groups, strict=True):
            group["lr"] = old["lr"]

    def step(
        self,
        grads: Mapping[str, Tensor],
        *,
        unreached: Collection[str] = (),
        lr: float | Sequence[float] | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
    ) -> Updated:
        """Update the parameters by one step.

        Args:
            grads: dL/dθ by name, of the parameters' shapes, for all that is trained; they may be
                changed where they are clipped.
            unreached: names whose gradient is zero because no path leads to them.
            lr: the learning rate from now on, or one for each of the optimizer's groups and one for
                the rest; None leaves it.
            clip_norm: gradients are scaled to at most this norm over all of them.
            clip_value: and their entries cut to ± this, before.

        Raises:
            GradientNotFinite: a gradient is infinite or NaN; nothing has changed.
            BadWeights: a gradient is missing, or of another shape; nothing has changed.
            BadOptimizer: there is not one rate for each group; nothing has changed.
        """
        reached = {n: p for n, p in self._masters.items() if n not in unreached}
        self._check(reached, grads)
        rates = self._rates(lr)
        for name, parameter in reached.items():
            parameter.grad = grads[name].to(parameter.device, parameter.dtype)
        try:
            if clip_value is not None:
                nn.utils.clip_grad_value_(reached.values(), clip_value)
            norm = self._clipped(reached.values(), clip_norm)
            for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            self._optimizer.step()
        finally:
            self._optimizer.zero_grad(set_to_none=True)
        for name, rounded in self._rounded.items():
            rounded.copy_(self._masters[name].detach())
        self.num_steps += 1
        return Updated(self.num_steps, norm)

    def tensors(self) -> dict[str, Tensor]:
        """Return all of it by SECTION/NAME, for a file: masters, buffers, moments by NAME/KEY."""
        found = {f"{WEIGHTS}/{name}": master for name, master in self.masters.items()}
        found |= {f"{BUFFERS}/{name}": tensor for name, tensor in self.buffers.items()}
        found |= {f"{MOMENTS}/{place}": value for place, value in self._moments()}
        return found

    def facts(self) -> dict[str, Any]:
        """Return what stands beside the tensors: the step, and numbers that are no tensors."""
        plain = {
            f"{name}/{key}": value
            for name, key, value in self._entries()
            if not isinstance(value, Tensor)
        }
        return {"step": self.num_steps, "moments": plain, "lr": self.rates}

    def restore(
        self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], *, with_moments: bool = True
    ) -> None:
        """Take the numbers of a state that `tensors` and `facts` returned.

        Args:
            with_moments: whether the optimizer goes on too; else it begins anew, at step 0.

        Raises:
            BadWeights: a parameter is missing or of another shape.
        """
        sections: dict[str, dict[str, Tensor]] = {WEIGHTS: {}, BUFFERS: {}, MOMENTS: {}}
        for name, tensor in tensors.items():
            section, _, rest = name.partition("/")
            sections[section][rest] = tensor
        own = self._masters.keys()
        self.adopt({n: t for n, t in sections[WEIGHTS].items() if n not in own})
        self._check(self._masters, sections[WEIGHTS])
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(sections[WEIGHTS][name])
                if name in self._rounded:
                    self._rounded[name].copy_(master)
        self.buffers = dict(sections[BUFFERS])
        if not with_moments:
            return
        self.num_steps = facts["step"]
        moments: dict[str, dict[str, Any]] = {name: {} for name in self._masters}
        for place, value in (sections[MOMENTS] | facts["moments"]).items():
            name, _, key = place.rpartition("/")
            moments[name][key] = value.clone() if isinstance(value, Tensor) else value
        self._put(moments)
        for group, rate in zip(self._optimizer.param_groups, facts["lr"], strict=True):
            group["lr"] = rate

    def move(self, device: torch.device) -> None:
        """Put all of it on another device, such as the host's memory."""
        for master in self._masters.values():
            master.data = master.data.to(device)
        for held in (self._rounded, self.buffers):
            held.update({name: tensor.to(device) for name, tensor in held.items()})
        moments: dict[str, dict[str, Any]] = {name: {} for name in self._masters}
        for name, key, value in self._entries():
            moments[name][key] = value
        self._put(moments)

    def _put(self, moments: Mapping[str, Mapping[str, Any]]) -> None:
        """Give the optimizer its moments, each where torch wants it, and in the dtype it has.

        `load_state_dict` alone would round them to the parameter's dtype, some of them (NAdam's
        product of momenta) with other bits than they were computed in.
        """
        document = self._optimizer.state_dict()
        order = [p for group in self._optimizer.param_groups for p in group["params"]]
        numbers = {id(parameter): number for number, parameter in enumerate(order)}
        document["state"] = {
            numbers[id(master)]: dict(moments[name])
            for name, master in self._masters.items()
            if moments[name]
        }
        self._optimizer.load_state_dict(document)
        for name, master in self._masters.items():
            placed = self._optimizer.state[master]
            for key, value in moments[name].items():
                if isinstance(value, Tensor):
                    placed[key] = value.to(placed[key].device)

    def _adopted(self, parameters: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
        """Hold copies of parameters, wider where they are in 16 bits; return these."""
        adopted = {}
        for name, given in parameters.items():
            copied = given.detach().clone(memory_format=torch.contiguous_format)
            if copied.dtype in NARROW:
                self._rounded[name] = copied
                copied = copied.float()
            adopted[name] = nn.Parameter(copied)
        self._masters |= adopted
        return adopted

    def _clipped(self, parameters: Collection[nn.Parameter], clip_norm: float | None) -> float:
        """Scale gradients to at most a norm; return the norm that they had."""
        largest = torch.inf if clip_norm is None else clip_norm
        grads = [p.grad for p in parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(grads)
        found = float(norm)
        if not found < torch.inf:
            names = [n for n, p in self._masters.items() if p.grad is not None]
            bad = [n for n, g in zip(names, grads, strict=True) if not bool(g.isfinite().all())]
            raise GradientNotFinite(
                f"expected a finite gradient, got infinity or NaN in {', '.join(bad[:3])}"
                f"{' …' if len(bad) > 3 else ''}: the run is unchanged, at step {self.num_steps}. "
                f"If the loss has been growing, go on from an earlier state with a lower lr or "
                f"with clip_norm; clip_value cuts infinite entries; in fp16 multiply the loss by "
                f"less, or make a run in bf16; NaN at a finite loss is often a root or a norm at 0"
            )
        if found > largest:
            nn.utils.clip_grads_with_norm_(parameters, largest, norm)
        return found

    def _rates(self, lr: float | Sequence[float] | None) -> list[float]:
        groups = self._optimizer.param_groups
        if lr is None:
            return self.rates
        if isinstance(lr, Sequence) and len(lr) != len(groups):
            raise BadOptimizer(
                f"lr: expected a number, or {len(groups)} of them, one for each group of the "
                f"optimizer and one for the rest, got {len(lr)}"
            )
        return list(lr) if isinstance(lr, Sequence) else [lr] * len(groups)

    def _check(self, parameters: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
        for name, parameter in parameters.items():
            found = given.get(name)
            if found is None or found.shape != parameter.shape:
                got = "none" if found is None else str(tuple(found.shape))
                raise BadWeights(
                    f"expected numbers of shape {tuple(parameter.shape)} for {name!r}, got {got}"
                )

    def _entries(self) -> list[tuple[str, str, Any]]:
        return [
            (name, key, value)
            for name, master in self._masters.items()
            for key, value in self._optimizer.state.get(master, {}).items()
        ]

    def _moments(self) -> list[tuple[str, Tensor]]:
        return [
            (f"{name}/{key}", value)
            for name, key, value in self._entries()
            if isinstance(value, Tensor)
        ]
