"""A model set up for per-sample work, and the plans found for it.

Setting up and putting back the model costs the same for one shard as for a thousand, so both happen
once, around all of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gradbox_engine.errors import BadInputs
from gradbox_engine.model.blame import blaming
from gradbox_engine.model.buffers import Buffers
from gradbox_engine.model.outputs import BARE, as_outputs, choose
from gradbox_engine.model.precision import AUTOCAST, accumulation_dtype, arithmetic, autocast
from gradbox_engine.model.prepared import model_device
from gradbox_engine.model.restore import restored
from gradbox_engine.model.shard_feed import call_arguments
from gradbox_engine.model.shard_rng import shard_stream
from gradbox_engine.model.weights import lay_over, wide_dtype, widen
from gradbox_engine.model.wrt import select
from gradbox_engine.per_sample.backward import Traced
from gradbox_engine.per_sample.errors import NoBatchAxis
from gradbox_engine.per_sample.folding import quicker_copies
from gradbox_engine.per_sample.planning.plan import Plan
from gradbox_engine.per_sample.planning.probe_runs import SAMPLES, plan_for
from gradbox_engine.per_sample.planning.verify import check_head, check_rows, mixed, reaches
from gradbox_engine.per_sample.planning.watched_model import fresh
from gradbox_engine.per_sample.recording.function_calls import PlanStale
from gradbox_engine.requests import Mode, Precision

CHECKS = frozenset({"coupling", "self"})
MOST_PLANS = 64  # of a model; a readout that a job brings makes a plan of its own

_WIDER = {dtype: accumulation_dtype(dtype) for dtype in (torch.bfloat16, torch.float16)}

_plans: weakref.WeakKeyDictionary[nn.Module, dict[Any, Plan]] = weakref.WeakKeyDictionary()


class Session:
    """One model in one mode, with requires_grad set on the wanted parameters alone.

    Entering it sets the model up, leaving it puts the model back.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        seed: int = 0,
        mode: Mode = "eval",
        wrt: Sequence[str] | None = None,
        precision: Precision = "fp32",
        output: str | int | None = None,
        readout: Callable[[Any, dict[str, Any]], Any] | None = None,
        weights: Mapping[str, Tensor] | None = None,
        method: str = "forward",
        unchecked: Sequence[str] = (),
    ) -> None:
        """Take the model.

        Args:
            unchecked: checks to leave out: "coupling" (no sample sees another) and "self" (the
                rows of a plan are compared with autograd's gradient).

        Raises:
            BadInputs: `unchecked` names something else, or the model has no such method.
        """
        if not CHECKS.issuperset(unchecked):
            raise BadInputs(
                f"unchecked: expected some of {sorted(CHECKS)}, got {sorted(unchecked)}"
            )
        self.model = model
        self.unchecked = frozenset(unchecked)
        self._seed, self._mode, self._wrt, self._precision = seed, mode, wrt, precision
        self._output, self._readout, self._weights = output, readout, weights
        self._method = method
        self._exits = ExitStack()
        self.parameters: dict[str, Tensor] = {}
        # Once a job, for a plan does not depend on the loss.
        self._head_checked = "coupling" in self.unchecked
        self._trusted: dict[int, Plan] = {}  # plans made or looked at with these weights
        self.device = model_device(model)
        self.rounding = AUTOCAST.get(precision, torch.float64)

    def __enter__(self) -> Session:
        with ExitStack() as exits:
            exits.enter_context(arithmetic(self._precision))
            exits.enter_context(restored(self.model))
            self.parameters = dict(select(self.model, self._wrt).parameters)
            _refuse_complex(self.parameters)
            if self._weights:
                lay_over(self.model, self._weights)
            if self._precision == "fp64":
                widen(self.model)
            self.model.train(self._mode == "train")
            wanted = {id(parameter) for parameter in self.parameters.values()}
            for parameter in self.model.parameters():
                parameter.requires_grad_(id(parameter) in wanted)
            self._buffers = Buffers(self.model)
            self._function = self.model if self._method == "forward" else self._entry()
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._exits.__exit__(*raised)

    def _entry(self) -> Callable[..., Any]:
        entry = getattr(self.model, self._method, None)
        if not callable(entry):
            raise BadInputs(
                f"method: expected a method of {type(self.model).__name__}, got {self._method!r}"
            )
        called: Callable[..., Any] = entry
        return called

    def arguments(self, shard: Mapping[str, Any]) -> dict[str, Any]:
        """Return a shard's arguments on the model's device, in the job's precision."""
        wide = self._precision == "fp64"
        moved = {}
        for name, value in shard.items():
            if isinstance(value, Tensor):
                dtype = wide_dtype(value.dtype) if wide else value.dtype
                value = value.detach().to(self.device, dtype)
            moved[name] = value
        return moved

    def stream(self, index: int) -> AbstractContextManager[None]:
        """Return the random numbers of shard `index`."""
        return shard_stream(self._seed, 0, index)

    def call(self, arguments: dict[str, Any]) -> Tensor:
        """Return z of one shard, one row a sample, in float32 or wider.

        Args:
            arguments: `fresh` ones, to which the model may write.
        """
        by_place, by_name = call_arguments(arguments)
        if self._precision in ("bf16", "fp16"):
            with autocast(self._precision, self.device):
                value = self._function(*by_place, **by_name)
        else:
            value = self._function(*by_place, **by_name)
        value = choose(value, self._output)
        if self._readout is not None:
            value = self._readout(value, arguments)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            source = "model" if self._readout is None else "readout"
            value = as_outputs(value, source=source).get(BARE)
        if value is None or value.dim() == 0:
            raise NoBatchAxis(
                "per-sample quantities need one output tensor whose dim 0 counts samples, got "
                f"{'several' if value is None else 'a single number'}: use output= or readout="
            )
        found: Tensor = value
        wide = _WIDER.get(found.dtype)
        return found if wide is None else found.to(wide)

    def trace(
        self,
        arguments: dict[str, Any],
        index: int,
        head: Callable[[Tensor], Tensor],
        *,
        foldable: bool = False,
    ) -> Traced:
        """Run a shard forward as planned, planning first where this is new.

        Args:
            foldable: whether all outputs are wanted at once and `head` only reshapes z, so that a
                small model may run on one copy of the batch for each output.

        Raises:
            CoupledSamples: one sample's output depends on another's input.
            NoBatchAxis: the samples cannot be found.
            SelfCheckFailed: the plan does not give autograd's gradient, nor does the loop road.
        """
        plan = self._plan(arguments, index)
        if not plan.checked or plan.reorders:
            plan = self._compared(plan, arguments, index, head)
        pending = self._pending(plan)
        copies = plan.copies if foldable and not pending else 1
        try:
            traced = self._traced(plan, arguments, index, head, max(1, copies))
        except PlanStale:
            plan = self._compared(self._replanned(arguments, index), arguments, index, head)
            traced, pending = self._traced(plan, arguments, index, head), []
        if not self._head_checked and not foldable:
            self._head_checked = check_head(traced.z, traced.value.detach(), head)
        if pending and not plan.reorders and reaches(traced, pending):
            del traced  # one graph at a time
            # What had no gradient when the plan was made may have hidden a coupling as well.
            plan = self._compared(self._planned(arguments, index), arguments, index, head)
            traced = self._traced(plan, arguments, index, head)
        if foldable and not plan.copies and not self._pending(plan):
            doubtful = plan.random or plan.stateful or plan.loops or "coupling" in self.unchecked
            plan.copies = (
                1
                if doubtful
                else quicker_copies(
                    traced.outputs,
                    lambda copies: self._traced(plan, arguments, index, head, copies),
                )
            )
        return traced

    def _compared(
        self, plan: Plan, arguments: dict[str, Any], index: int, head: Callable[[Tensor], Tensor]
    ) -> Plan:
        """Compare a plan's rows with autograd's and return the plan that holds."""
        if "self" in self.unchecked:
            plan.checked = True
            return plan
        combined = mixed(head)
        try:
            traced = self._traced(plan, arguments, index, combined)
        except PlanStale:
            plan = self._replanned(arguments, index)
            traced = self._traced(plan, arguments, index, combined)
        if not self._head_checked:
            with torch.no_grad():
                before = head(traced.z)
            self._head_checked = check_head(traced.z, before, head)
        if check_rows(traced, plan):
            check_rows(self._traced(plan, arguments, index, combined), plan)
        plan.checked = True
        return plan

    def _pending(self, plan: Plan) -> list[str]:
        """Return the parameters whose rows no gradient has confirmed yet."""
        if len(plan.verified) == len(self.parameters) or "self" in self.unchecked:
            return []
        return [name for name in self.parameters if name not in plan.verified]

    def count(self, arguments: dict[str, Any], index: int) -> int:
        """Return how many samples a shard has."""
        samples = self._plan(arguments, index).samples(arguments)
        if samples is None:
            raise NoBatchAxis(f"shard {index}: expected a tensor that holds samples, got none")
        return samples

    def _plan(self, arguments: dict[str, Any], index: int) -> Plan:
        plan = _plans.setdefault(self.model, {}).get(self._signature(arguments))
        if plan is None:
            return self._planned(arguments, index)
        if id(plan) not in self._trusted:
            if "coupling" not in self.unchecked and (not plan.separate or self._awoken(plan)):
                return self._planned(arguments, index)
            self._trusted[id(plan)] = plan
        return plan

    def _awoken(self, plan: Plan) -> bool:
        """Say whether a parameter that was zero, and may have gated a coupling, no longer is."""
        return any(bool(zero.any()) for zero in plan.zeros)

    def _planned(self, arguments: dict[str, Any], index: int, samples: int = SAMPLES) -> Plan:
        with blaming("the model", f"shard {index}"):
            plan = plan_for(self, arguments, index, samples=samples)
        self.restore_buffers()
        plan.zeros = tuple(p for p in self.model.parameters() if not p.any())
        plans = _plans.setdefault(self.model, {})
        plans[self._signature(arguments)] = plan
        while len(plans) > MOST_PLANS:
            del plans[next(iter(plans))]
        self._trusted[id(plan)] = plan
        return plan

    def _replanned(self, arguments: dict[str, Any], index: int) -> Plan:
        """Plan on as many samples as the shard has; send all to the loop if that fails too."""
        samples = max(
            (x.shape[0] for x in arguments.values() if isinstance(x, Tensor) and x.dim()), default=1
        )
        plan = self._planned(arguments, index, samples)
        try:
            self._traced(plan, arguments, index, lambda z: z.flatten(1))
        except PlanStale:
            plan.steps.clear()
            plan.watched = False
            plan.loop(self.parameters, "the model's calls differ from run to run")
        return plan

    def _traced(
        self,
        plan: Plan,
        arguments: dict[str, Any],
        index: int,
        head: Callable[[Tensor], Tensor],
        copies: int = 1,
    ) -> Traced:
        if plan.stateful:
            # Before the call and not after it: the graph may hold what the call wrote.
            self.restore_buffers()
        stream = self.stream(index) if plan.random else nullcontext()
        with blaming("the model or the loss", f"shard {index}"), stream:
            return Traced(self, plan, fresh(arguments), head, copies=copies)

    def restore_buffers(self) -> None:
        """Give every buffer the value it had when the session began, and no graph."""
        self._buffers.restore(self._buffers.first)
        for buffer in self.model.buffers():
            if buffer.requires_grad:
                buffer.detach_()

    def _signature(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return what a plan depends on."""
        sizes = tuple(
            (name, value.shape, value.dtype) if isinstance(value, Tensor) else (name, repr(value))
            for name, value in arguments.items()
        )
        return (
            self._mode, self._precision, self._method, self._output, self._readout,
            tuple(self.parameters), self.unchecked, sizes,
        )  # fmt: skip


def _refuse_complex(parameters: Mapping[str, Tensor]) -> None:
    names = [name for name, parameter in parameters.items() if parameter.is_complex()]
    if names:
        raise BadInputs(
            f"wrt: expected real parameters, got the complex {names}: leave them out by wrt=, or "
            "let the model hold them as real ones, by torch.view_as_real"
        )
