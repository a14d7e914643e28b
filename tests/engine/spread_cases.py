"""Jobs on a model of two halves, which may lie on two devices, as `device_map` puts them there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import (
    FirstOutputs,
    Group,
    Objective,
    Penalty,
    gradient_at_cotangents,
    mixed_gradient,
    set_gradient,
    set_outputs,
)
from gradbox_engine.per_sample import jacobian, per_sample_gradient
from tests.engine.interrupted import Kept, Killed, KilledAt

hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")

Answer = Mapping[str, Tensor]


class Halves(nn.Module):
    """Batch norm and dropout in the first half; the second one ends in z."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2))
        self.second = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))

    def scores(self, x: Tensor) -> Tensor:
        """The same, by an entry point whose outputs nothing moves to where the inputs were."""
        return self.second(self.first(x))


def whole() -> nn.Module:
    torch.manual_seed(0)
    return Halves().double()


def apart(first: torch.device, second: torch.device) -> nn.Module:
    """Return the same, with nothing that moves what the first half returns."""
    model = whole()
    model.first.to(first)
    model.second.to(second)
    return model


def spread(first: torch.device, second: torch.device) -> nn.Module:
    """Return the model with its halves on two devices."""
    model = apart(first, second)
    hooks.add_hook_to_module(model, hooks.AlignDevicesHook(io_same_device=True))
    hooks.attach_align_device_hook_on_blocks(
        model,
        execution_device={"first": first, "second": second},
        offload={"first": False, "second": False},
    )
    return model


torch.manual_seed(1)
SHARDS: Final = [{"x": torch.randn(4, 5, dtype=torch.float64)} for _ in range(5)]


def coupled(z: Tensor) -> Tensor:
    return (z @ z.T).logsumexp(1).mean()


def gradient(model: nn.Module, *, method: str = "forward", **given: Any) -> Answer:
    group = Group("z", SHARDS, method=method)
    found = set_gradient(model, [group], Objective(coupled), mode="train", seed=1, **given)
    return {**found.grads, **{f"buffer {n}": b for n, b in (found.buffers or {}).items()}}


def input_gradients(model: nn.Module) -> Answer:
    found = set_gradient(
        model,
        [Group("z", SHARDS)],
        Objective(coupled),
        wrt=["*", "inputs.x"],
        returns=("grads", "input_grads"),
    )
    return {str(i): g for i, g in enumerate((found.input_grads or {})["z"]["x"])}


def resumed(model: nn.Module) -> Answer:
    """Kill the job in its replay, and go on from its checkpoint."""
    kept = Kept()
    try:
        gradient(model, observer=KilledAt("replay", 3), checkpoints=kept)
    except Killed:
        return gradient(model, checkpoints=kept)
    raise AssertionError("expected the job to be killed")


def in_two_jobs(model: nn.Module, *, retain: int) -> Answer:
    """Ask for Z, and then for the gradient at cotangents."""
    groups = [Group("z", SHARDS)]
    found = set_outputs(model, groups, mode="train", seed=1, retain=retain)
    z = found.outputs["z"]
    assert isinstance(z, Tensor)
    first = found.kept or FirstOutputs({"z": {"": z}}, found.rows)
    cotangents = {"z": {"": z.cos()}}
    at = gradient_at_cotangents(model, groups, cotangents, first, mode="train", seed=1)
    return {**at.grads, "z": z}


def mixed(model: nn.Module) -> Answer:
    y = torch.ones(3, dtype=torch.float64, device=next(model.parameters()).device)
    found = mixed_gradient(
        model,
        Group("z", SHARDS),
        Objective(lambda y, v: (y * v.sin()).sum(), {"y": y}, {"y": y}),
        Objective(lambda dfdz: dfdz.pow(2).sum()),
        z="x",
    )
    return found.grads


def per_sample(model: nn.Module, **given: Any) -> Answer:
    targets = torch.ones(20, 3, dtype=torch.float64)
    found = per_sample_gradient(
        model,
        SHARDS,
        lambda z, t: (z - t).pow(2).sum(1),
        loss_inputs={"t": targets},
        **given,
    )
    return found.arrays if found.factors is None else {"gram": found.factors.gram()}


def of_outputs(model: nn.Module, **given: Any) -> Answer:
    return jacobian(model, SHARDS, **given).arrays


def tap(scale: Callable[[Tensor], Tensor] | None = None) -> list[Penalty]:
    return [
        Penalty(at="second.1", loss=lambda t: t.pow(2).sum(), weight=0.3, per_sample_scale=scale)
    ]


CASES: Final[Mapping[str, Callable[[nn.Module], Answer]]] = {
    "gradient": gradient,
    "all graphs kept": lambda model: gradient(model, retain=10**7),
    "no graph kept": lambda model: gradient(model, retain=0),
    "another entry point": lambda model: gradient(model, method="scores"),
    "a readout of it": lambda model: gradient(
        model, method="scores", readout=lambda z, inputs: z * inputs["x"][:, :3]
    ),
    "buffers": lambda model: gradient(model, returns=("grads", "buffers")),
    "inputs": input_gradients,
    "a penalty": lambda model: gradient(model, penalties=tap()),
    "a penalty by sample": lambda model: gradient(model, penalties=tap(lambda z: z.sum(1))),
    "fp64": lambda model: gradient(model, precision="fp64"),
    "weights": lambda model: gradient(
        model, weights={"second.0.weight": torch.ones(8, 8, dtype=torch.float64)}
    ),
    "resumed": resumed,
    "in two jobs": lambda model: in_two_jobs(model, retain=0),
    "in two jobs, graphs kept": lambda model: in_two_jobs(model, retain=10**7),
    "mixed": mixed,
    "dense rows": per_sample,
    "factors": lambda model: per_sample(model, form="factored"),
    "norms": lambda model: per_sample(model, reduce="norm"),
    "a Gram": lambda model: per_sample(model, reduce="gram"),
    "a clipped sum": lambda model: per_sample(model, reduce="clipped_sum", clip=1.0),
    "a projection": lambda model: per_sample(model, reduce="projection", dim=64),
    "a Jacobian": of_outputs,
    "its Gram": lambda model: of_outputs(model, reduce="gram"),
    "a jvp": lambda model: of_outputs(
        model, reduce="jvp", vectors={n: torch.ones_like(p) for n, p in model.named_parameters()}
    ),
    "a vjp": lambda model: of_outputs(
        model, reduce="vjp", vectors=torch.ones(20, 3, dtype=torch.float64)
    ),
}
