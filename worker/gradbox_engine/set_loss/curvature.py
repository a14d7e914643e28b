"""`curvature`: products with the Hessian of a set loss, or with its Gauss-Newton matrix.

    L(θ) = g(Z),  Z = cat(z₁ … zₙ),  zᵢ = f(xᵢ; θ),  Jᵢ = ∂zᵢ/∂θ,  z̄ = ∂g/∂Z,  żᵢ = Jᵢ v

    Gauss-Newton    G v = Σᵢ Jᵢᵀ cᵢ,  c = ∇²g ż
    Hessian         H v = G v + Σᵢ ∂⟨Jᵢᵀ z̄ᵢ, v⟩/∂θ

with no constant anywhere: a mean is a mean because g says so. A product has the phases of a
gradient, and the machinery of one: a shard's output is the stack [zᵢ, żᵢ of each vector], whose
cotangent is [z̄ᵢ, cᵢ of each vector]; differentiated are shifts of θ, one a vector and all zero.

    each shard    zᵢ and żᵢ, the derivative of p ↦ ⟨Jᵢᵀ p, v⟩      the first pass
    here          z̄, and c of each vector                          the cotangents
    each shard    its terms of both sums, see `Stack`              the replay

Sources: Pearlmutter 1994, "Fast Exact Multiplication by the Hessian", section 3; Schraudolph 2002,
"Fast Curvature Matrix-Vector Products", section 3.

Cost, with F and B one shard's forward and backward, V vectors, n shards of which k graphs are kept:
about n(F + 2B + 4BV) + (n - k)(F + B + BV), and of Gauss-Newton 2BV less and B. Memory beyond the
model: one shard's graph and that of its backward pass, the kept graphs, V + 1 times Z, V gradients.

Not optimal: vectors go through a shard's graph one after the other, and a replayed shard takes ż
once more. Not noticed: a hook of the model that runs a backward pass without create_graph=True,
whose second derivative is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from gradbox_engine.checkpoint import NoCheckpoints
from gradbox_engine.errors import BadInputs, ModelCallFailed, NoTangent
from gradbox_engine.model.calling.blame import blaming
from gradbox_engine.model.calling.outputs import Outputs, as_outputs
from gradbox_engine.model.kernels import checkpoints_inlined, differentiable_kernels
from gradbox_engine.model.precision import accumulation_dtype
from gradbox_engine.model.prepared import Prepared, prepared
from gradbox_engine.model.wrt import INPUTS, Selection, select
from gradbox_engine.ranges.held_job import HeldJob
from gradbox_engine.ranges.one_device import OneDevice, one_range
from gradbox_engine.replay.cotangents import derivatives, finite_number, refuse_constant
from gradbox_engine.replay.gradient_sums import GradientSums
from gradbox_engine.replay.retention import graph_budget
from gradbox_engine.requests import (
    CallKeywords,
    CallOptions,
    CurvatureKind,
    CurvatureResult,
    Group,
    Objective,
    Observer,
    Phase,
    Retain,
    Silent,
)
from gradbox_engine.set_loss.conjugate_gradients import ConjugateGradients, Solution
from gradbox_engine.set_loss.held_passes import SetPasses
from gradbox_engine.set_loss.set_gradient import split_set_gradient
from gradbox_engine.torch_private import has_dead_end, tree_flatten, tree_unflatten


def curvature(
    model: nn.Module,
    groups: Sequence[Group],
    objective: Objective,
    vectors: Mapping[str, Tensor],
    *,
    kind: CurvatureKind,
    solve: ConjugateGradients | None = None,
    wrt: Sequence[str] | None = None,
    retain: Retain = 0,
    observer: Observer | None = None,
    **options: Unpack[CallKeywords],
) -> CurvatureResult:
    """Return products of vectors with the curvature of L = g(Z, extras), or with its inverse.

    Args:
        objective: g; its own parameters are held constant.
        vectors: name → (V, *shape of the parameter); zero where one of `wrt` is left out.
        kind: "hessian", or "ggn" for the Gauss-Newton matrix.
        solve: how to multiply with the inverse; None multiplies with the matrix itself.
        wrt: patterns over names of parameters, by default every floating-point one.
        observer: hears of products, before each shard of one.
        options: how the model is called; nothing is recomputed.

    Raises:
        BadInputs: vectors do not fit; or numbers are complex, or pass through float16.
        NoTangent: an operation of the model has no second derivative.
        NotPositiveDefinite: see `ConjugateGradients`.
        EngineError: see `set_gradient`.
    """
    began_s = time.perf_counter()
    selection = select(model, wrt)
    _check(selection, vectors)
    call_options = CallOptions(**options).without_penalties("curvature")
    products = Products(
        list(selection.parameters.values()),
        kind,
        objective,
        call_options.readout,
        retain,
        observer or Silent(),
        num_products=1 if solve is None else solve.max_iterations + 1,
    )
    call_options = replace(call_options, readout=products.stacks, recompute="off")
    with (
        prepared(model, groups, selection, call_options) as ready,
        differentiable_kernels(),
        checkpoints_inlined(),
    ):
        if ready.in_float16:
            raise BadInputs(
                "precision: expected numbers with more range than float16, which does not hold "
                "second derivatives; take precision='bf16', or 'fp64'"
            )
        products.ready = ready
        v_VP = products.rows([vectors.get(name) for name in selection.parameters])
        found = Solution(products(v_VP)) if solve is None else solve.solve(products, v_VP)
        products.step("products", 0, 0)
        return CurvatureResult(
            loss=products.loss,
            products=dict(zip(selection.parameters, products.parts(found.x), strict=True)),
            replay_difference=products.difference,
            seconds={"products": time.perf_counter() - began_s},
            iterations=found.iterations,
            residuals=found.residuals,
        )


def _check(selection: Selection, vectors: Mapping[str, Tensor]) -> None:
    """Check that real parameters are differentiated by alone, and that vectors are rows of them.

    Raises:
        BadInputs: they are not.
    """
    parameters = selection.parameters
    others = [f"{INPUTS}{name}" for name in selection.input_patterns]
    others += [name for name, parameter in parameters.items() if parameter.is_complex()]
    if others:
        raise BadInputs(f"wrt: expected real parameters alone, got {others}; leave them out")
    shapes = {name: tuple(rows.shape) for name, rows in vectors.items()}
    numbers = {shape[:1] for shape in shapes.values()}
    if len(numbers) != 1 or any(
        name not in parameters or shape != (*shape[:1], *parameters[name].shape)
        for name, shape in shapes.items()
    ):
        raise BadInputs(
            f"vectors: expected (V, *shape) for parameters that wrt selects, with one V for all, "
            f"got {shapes}"
        )


@dataclass
class Products:
    """Multiplies rows (V, P) with the curvature; `stacks` is what the model gives meanwhile.

    A row has the numbers of all parameters, one parameter after the other.
    """

    parameters: Sequence[Tensor]
    kind: CurvatureKind
    objective: Objective
    readout: Callable[..., Any] | None
    retain: Retain
    observer: Observer
    num_products: int  # at most
    ready: Prepared = field(init=False)
    num_done: int = 0
    loss: float = 0.0
    difference: float = 0.0  # the largest, see `comparison`
    vectors: list[Sequence[Tensor]] = field(default_factory=list)  # those that are multiplied now
    shifts: dict[str, Tensor] = field(default_factory=dict)  # zeros, whose gradients are products

    def __call__(self, rows_VP: Tensor) -> Tensor:
        """Return the products of the rows."""
        ready, groups, parts = self.ready, self.ready.calls.groups, self.parts(rows_VP)
        given = [part.to(p) for part, p in zip(parts, self.parameters, strict=True)]
        self.vectors = list(zip(*given, strict=True))
        self.shifts = {
            f"{place}": part.new_zeros(()).expand(part.shape).requires_grad_()
            for place, part in enumerate(given)
        }
        sums_bytes = GradientSums(self.shifts).expected_bytes()
        budget = graph_budget(self.retain, ready.devices, sums_bytes=sums_bytes)
        passes = SetPasses(ready, self, self.shifts, budget, for_a_later_job=False)
        answer = split_set_gradient(
            OneDevice(HeldJob(passes, lambda _: NoCheckpoints())),
            one_range(groups),
            groups,
            replace(self.objective, function=self.linear_form),
            device=ready.device,
            observer=self,
            seed=ready.options.seed,
            precision=ready.options.precision,
        )
        self.difference = max(self.difference, answer.replay_difference)
        self.num_done += 1
        return self.rows([answer.grads[name] for name in self.shifts])

    def step(self, phase: Phase, done: int, total: int) -> None:
        """Hear of a shard within a product, and tell how many products are done."""
        self.observer.step("products", self.num_done, self.num_products)

    def rows(self, parts: Sequence[Tensor | None]) -> Tensor:
        """Return rows of what they have of each parameter, (V, *shape); None stands for zeros."""
        num_vectors = next(len(part) for part in parts if part is not None)
        given = [
            p.new_zeros(num_vectors, *p.shape) if part is None else part
            for part, p in zip(parts, self.parameters, strict=True)
        ]
        wide = [accumulation_dtype(p.dtype) for p in self.parameters]
        flat = [x.flatten(1).to(self.ready.device, d) for x, d in zip(given, wide, strict=True)]
        return torch.cat(flat, 1)

    def parts(self, rows_VP: Tensor) -> list[Tensor]:
        """Return what rows have of each parameter, (V, *shape)."""
        flat = torch.split(rows_VP, [p.numel() for p in self.parameters], 1)
        return [x.reshape(-1, *p.shape) for x, p in zip(flat, self.parameters, strict=True)]

    def stacks(self, output: Any, inputs: dict[str, Any]) -> Outputs:
        """Return [z, J v of each vector] of a shard by the names of z; this is its readout."""
        value = output if self.readout is None else self.readout(output, inputs)
        outputs = as_outputs(value, source="model" if self.readout is None else "readout")
        z = [x.unsqueeze(0) if x.ndim == 0 else x for x in outputs.values()]
        with torch.autocast(z[0].device.type, enabled=False), _differentiated_twice():
            probes = [torch.zeros_like(x, requires_grad=True) for x in z]
            pulled = derivatives(z, self.parameters, probes, create_graph=True)
            if has_dead_end(*(gradient for gradient in pulled if gradient is not None)):
                raise NotImplementedError("a backward marked once_differentiable")
            if any(parameter.grad is not None for parameter in self.parameters):
                raise NotImplementedError("a backward pass within a backward pass")
            tangents = [derivatives(pulled, probes, vector) for vector in self.vectors]
        stacked = _stacked([z, *tangents], z, dim=1)
        found = Stack.apply(self, z, stacked, *self.shifts.values())  # type: ignore[no-untyped-call]
        return dict(zip(outputs, found, strict=True))

    def linear_form(self, *args: Any, **given: Any) -> Tensor:
        """Take g's place: return ⟨[z̄, c …], [Z, Ż …]⟩, where the cotangents count as constants.

        So they are what its derivative is.
        """
        names = () if args else [group.name for group in self.ready.calls.groups]
        stacks, form = tree_flatten((args, {name: given.pop(name) for name in names}))
        leaves = [stack[:, 0].detach().requires_grad_() for stack in stacks]
        z, named_z = tree_unflatten(leaves, form)
        loss = self.objective.function(*z, **named_z, **given)
        if isinstance(loss, Tensor) and loss.ndim == 1:  # a number a sample
            loss = loss.sum()
        self.loss = finite_number(loss, called="loss")
        refuse_constant(loss, called="loss")
        rows = [derivatives([loss], leaves, create_graph=True)]
        for number in range(1, 1 + len(self.vectors)):
            rows.append(derivatives(rows[0], leaves, [stack[:, number] for stack in stacks]))
        cotangents = _stacked(rows, leaves, dim=1)
        return torch.stack([(c * x).sum() for c, x in zip(cotangents, stacks, strict=True)]).sum()

    def of_shard(self, z: Sequence[Tensor], stacks: Sequence[Tensor]) -> list[Tensor]:
        """Return a shard's terms of the products by parameter: Jᵀc, and of a Hessian ∂⟨Jᵀz̄, v⟩/∂θ.

        Args:
            z: with its graph.
            stacks: [z̄, c of each vector] of each z.
        """
        first, *others = zip(*(stack.unbind(1) for stack in stacks), strict=True)
        pulled: list[Tensor | None] = [None] * len(self.parameters)
        with torch.enable_grad(), _differentiated_twice():
            if self.kind == "hessian":
                pulled = derivatives(z, self.parameters, first, create_graph=True)
            rows = [
                derivatives([*z, *pulled], self.parameters, [*c, *vector])
                for c, vector in zip(others, self.vectors, strict=True)
            ]
        return _stacked(rows, self.parameters, dim=0)


class Stack(torch.autograd.Function):
    """[z, J v of each vector], whose backward pass gives a shard's terms of the products.

    Autograd's own would take a third derivative, which fewer operations have.
    """

    @staticmethod
    def forward(ctx: Any, products: Products, z: Any, stacks: Any, *shifts: Tensor) -> Any:
        ctx.products, ctx.z = products, z
        return tuple(stacks)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return None, None, None, *ctx.products.of_shard(ctx.z, cotangents)


@contextmanager
def _differentiated_twice() -> Iterator[None]:
    """Say what to do where a model cannot be.

    Raises:
        NoTangent: an operation has no second derivative.
    """
    try:
        with blaming("the second derivative", "curvature"):
            yield
    except ModelCallFailed as error:
        raise NoTangent(
            f"expected every operation of the model to have a backward pass that can be "
            f"differentiated again, got {error.__cause__}; write an operation of torch's own out "
            f"of simpler ones, and the backward of a custom autograd.Function likewise"
        ) from error


def _stacked(
    rows: Sequence[Sequence[Tensor | None]], like: Sequence[Tensor], *, dim: int
) -> list[Tensor]:
    """Return, for each of some tensors, its rows as one without a graph; None stands for zeros."""
    return [
        torch.stack([torch.zeros_like(x) if row is None else row for row in of_x], dim).detach()
        for x, of_x in zip(like, zip(*rows, strict=True), strict=True)
    ]
