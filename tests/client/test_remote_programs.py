"""Programs drawn at random, run with a remote model and with a local one beside it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from gradbox import GradClient, ModelCallFailed
from gradbox_engine import shard_stream
from tests import case_models
from tests.boxes import TestBox
from tests.oracle import TOLERANCE, difference

NUM_PROGRAMS = 40
NEAR = {"rtol": 1e-10, "atol": 1e-10}
STEPS = {
    "call": 5,
    "call without a graph": 1,
    "call on an output": 1,
    "go backward": 4,
    "differentiate by inputs": 1,
    "change the mode": 1,
    "change a weight": 1,
    "zero gradients": 1,
    "read buffers": 1,
    "write to an output": 2,
    "write to what a loss saved": 1,
    "differentiate by some": 2,
    "go backward by a hook": 1,
    "go on after an error": 1,
}


WRITES: Sequence[Callable[[Tensor], object]] = (
    lambda z: z.mul_(1.5),
    lambda z: z[0].add_(1),
    lambda z: z.T[1:].clamp_(max=0.5),
    lambda z: z.copy_(z.flip(0)),
)


class Local:
    """A model whose weights may change between a call and its backward pass."""

    def __init__(self, model: nn.Module, *, mode: str, seed: int) -> None:
        self.module = model.train(mode == "train")
        self.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        self._seed, self._num_calls = seed, 0
        self._versions: list[dict[str, Tensor]] = []
        self.lay_over({name: p.detach() for name, p in model.named_parameters()})

    def lay_over(self, weights: dict[str, Tensor]) -> None:
        before = self._versions[-1] if self._versions else {}
        now = {name: p.detach().clone() for name, p in {**before, **weights}.items()}
        self._versions.append({n: p.requires_grad_(p.is_floating_point()) for n, p in now.items()})

    def __call__(self, x: Tensor) -> Tensor:
        self.buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}
        index, self._num_calls = self._num_calls, self._num_calls + 1
        with shard_stream(self._seed, group=0, shard=index):
            return functional_call(self.module, {**self._versions[-1], **self.buffers}, (x,))

    @property
    def grads(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for version in self._versions:
            for name, p in version.items():
                if p.grad is not None:
                    found[name] = found[name] + p.grad if name in found else p.grad
        return found

    def zero_grad(self) -> None:
        for version in self._versions:
            for p in version.values():
                p.grad = None


@dataclass(eq=False)
class Twins:
    """An output of either model, and the inputs that they come from."""

    z: tuple[Tensor, Tensor]
    x: tuple[Tensor, Tensor]

    @property
    def of_leaf(self) -> bool:
        return self.x[0].is_leaf and self.x[0].requires_grad


def loss_of(zs: Sequence[Tensor], kind: int) -> Tensor:
    terms = []
    for number, z in enumerate(zs, start=1):
        u = number * z
        terms.append([u.square().sum(), u.sin().mean(), u[0] @ u[-1], u.logsumexp((0, 1))][kind])
    return torch.stack(terms).sum() + (zs[0].mean(0) * zs[-1].mean(0)).sum()


class Program:
    """What was drawn, step by step; every step compares the two."""

    def __init__(self, client: GradClient, seed: int, **options: Any) -> None:
        self._of, self._numbers = random.Random(seed), torch.Generator().manual_seed(seed)
        name = self._of.choice(["mlp", "inplace_mlp", "average_in_place", "frozen"])
        mode = self._of.choice(["train", "eval"])
        model: nn.Module = getattr(case_models, name)()
        floating = [(n, p) for n, p in model.named_parameters() if p.is_floating_point()]
        self._weights = {n: p.detach().clone() for n, p in floating}
        retain = self._of.choice(["auto", "auto", 0])
        self.remote = client.model(
            name, mode=mode, seed=seed, weights=self._weights, retain=retain, **options
        )
        self.local = Local(model, mode=mode, seed=seed)
        self._twins: list[Twins] = []
        self._failed = False

    def run(self) -> None:
        for _ in range(self._of.randint(6, 16)):
            if self._failed:
                return  # how far autograd came before an error is its own affair
            (step,) = self._of.choices(list(STEPS), weights=list(STEPS.values()))
            getattr(self, step.replace(" ", "_"))()
            remote, local = self.remote.grads, self.local.grads
            assert remote.keys() == local.keys()
            assert not local or difference(remote, local) <= TOLERANCE

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=self._numbers)

    def call(self) -> None:
        x, leaf = self.normal(self._of.randint(2, 4), 5), self._of.random() < 0.3
        self._called(*(x.clone().requires_grad_(leaf) for _ in range(2)))

    def call_without_a_graph(self) -> None:
        x = self.normal(2, 5)
        with torch.no_grad():
            torch.testing.assert_close(self.remote(x) + 0, self.local(x), **NEAR)

    def call_on_an_output(self) -> None:
        if self._twins:
            earlier = self._twins.pop(self._of.randrange(len(self._twins)))
            lift = self.normal(3, 5)
            self._called(*(z @ lift for z in earlier.z))

    def _called(self, x: Tensor, same: Tensor) -> None:
        self._twins.append(Twins((self.remote(x), self.local(same)), (x, same)))

    def go_backward(self) -> None:
        if not self._twins:
            return
        some = self._of.sample(self._twins, self._of.randint(1, len(self._twins)))
        kind, retained = self._of.randrange(4), self._of.random() < 0.4
        losses = [loss_of([twins.z[i] for twins in some], kind) for i in range(2)]
        torch.testing.assert_close(*losses, **NEAR)
        for loss in losses:
            loss.backward(retain_graph=retained)
        for twins in some:
            if twins.of_leaf:
                torch.testing.assert_close(twins.x[0].grad, twins.x[1].grad, **NEAR)
        if not retained:
            self._twins = [twins for twins in self._twins if twins not in some]

    def differentiate_by_inputs(self) -> None:
        some = [twins for twins in self._twins if twins.of_leaf]
        if not some:
            return
        remote, local = (
            torch.autograd.grad(
                loss_of([twins.z[i] for twins in some], 1),
                [twins.x[i] for twins in some],
                retain_graph=True,
            )
            for i in range(2)
        )
        torch.testing.assert_close(remote, local, **NEAR)

    def change_the_mode(self) -> None:
        train = self._of.random() < 0.5
        self.remote.train(train)
        self.local.module.train(train)

    def change_a_weight(self) -> None:
        weight = self._weights[self._of.choice(sorted(self._weights))]
        weight += 0.1 * self.normal(*weight.shape)
        self.local.lay_over(self._weights)

    def zero_gradients(self) -> None:
        self.remote.zero_grad()
        self.local.zero_grad()

    def read_buffers(self) -> None:
        for name, buffer in self.remote.buffers.items():
            torch.testing.assert_close(buffer, self.local.buffers[name], **NEAR)

    def write_to_an_output(self) -> None:
        if self._twins:
            kind = self._of.randrange(len(WRITES))
            for z in self._of.choice(self._twins).z:
                WRITES[kind](z)

    def write_to_what_a_loss_saved(self) -> None:
        kind = self._of.randrange(len(WRITES))
        for z in self._of.choice(self._twins).z if self._twins else ():
            loss = z.square().sum()
            WRITES[kind](z.detach())
            with pytest.raises(RuntimeError, match="inplace operation"):
                loss.backward(retain_graph=True)

    def differentiate_by_some(self) -> None:
        """Subsets of inputs and outputs, some of them unused, at given cotangents."""
        some = self._some()
        if not some:
            return
        at = [self.normal(*twins.z[1].shape) for twins in some]
        pool = [(twins, of) for twins in self._twins for of in ("x", "z")]
        pool = [(t, of) for t, of in pool if getattr(t, of)[1].requires_grad]
        by = self._of.sample(pool, self._of.randint(1, min(3, len(pool))))
        options: dict[str, bool] = self._of.choice(
            [{}, {"allow_unused": True}, {"materialize_grads": True}]
        )
        self._compared(
            lambda i: torch.autograd.grad(
                [twins.z[i] for twins in some],
                [getattr(twins, of)[i] for twins, of in by],
                grad_outputs=at,
                retain_graph=True,
                **options,
            )
        )

    def go_backward_by_a_hook(self) -> None:
        some, factor = self._some(), 1 + self._of.random()

        def backward(i: int) -> tuple[Tensor | None]:
            some[0].z[i].retain_grad()
            hook = some[0].z[i].register_hook(lambda gradient: factor * gradient)
            loss_of([twins.z[i] for twins in some], 1).backward(retain_graph=True)
            hook.remove()
            return (some[0].z[i].grad,)

        if some:
            self._compared(backward)

    def go_on_after_an_error(self) -> None:
        for twins in self._twins:  # else they would fail with it
            assert twins.z[0].isfinite().all()
        for model in (self.remote, self.local):
            with pytest.raises((ModelCallFailed, RuntimeError), match="multiplied"):
                _ = model(self.normal(2, 9)).shape

    def _some(self) -> list[Twins]:
        return self._of.sample(self._twins, self._of.randint(0, len(self._twins)))

    def _compared(self, act: Callable[[int], Sequence[Tensor | None]]) -> None:
        """Act on either model: both raise the same error, or both find the same."""
        found: list[Any] = []
        for i in range(2):
            try:
                found.append([0 if f is None else f.clone() for f in act(i)])
            except RuntimeError as error:
                found.append(str(error)[:60])
                self._failed = True
        torch.testing.assert_close(*found, **NEAR) if not self._failed else None
        assert not self._failed or found[0] == found[1]


@pytest.mark.parametrize("seed", range(NUM_PROGRAMS))
def test_a_program_sees_what_it_would_see_of_a_local_model(twin: TestBox, seed: int) -> None:
    with twin.client() as client:
        Program(client, seed).run()
