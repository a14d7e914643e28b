"""The naive code that remote autograd is compared with: local calls under (seed, 0, i)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradbox_engine import shard_stream
from tests.cases import Case
from tests.device import DEVICE, moved, native_recurrence


class NaiveModel:
    """A local model on DEVICE whose call number i runs under the random stream (seed, 0, i)."""

    def __init__(self, model: nn.Module, *, mode: str = "eval", seed: int = 0) -> None:
        self.module = model.to(DEVICE).train(mode == "train")
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        self._seed = seed
        self._num_calls = 0

    def __call__(self, *args: Any, method: str = "forward", **kwargs: Any) -> Any:
        index, self._num_calls = self._num_calls, self._num_calls + 1
        entry = self.module if method == "forward" else getattr(self.module, method)
        places = [_on_device(value) for value in args]
        with shard_stream(self._seed, group=0, shard=index), native_recurrence():
            return _on_host(entry(*places, **moved(kwargs)))

    @property
    def grads(self) -> dict[str, Tensor]:
        named = self.module.named_parameters()
        return {name: p.grad.cpu() for name, p in named if p.grad is not None}


def _on_device(value: Any) -> Any:
    return value.to(DEVICE) if isinstance(value, Tensor) else value


def _on_host(value: Any) -> Any:
    """Return what a model returned with its tensors on the host, still in their graph."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {name: _on_host(item) for name, item in value.items()}
    return tuple(map(_on_host, value)) if isinstance(value, tuple) else value


def arguments(shard: dict[str, Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    places = [value for name, value in shard.items() if name.isdigit()]
    return places, {name: value for name, value in shard.items() if not name.isdigit()}


def local_outputs(case: Case, f: NaiveModel) -> dict[str, list[Any]]:
    """Call a local model on all shards of a case, as the box would."""
    zs: dict[str, list[Any]] = {}
    for group, shards in case.groups.items():
        for shard in shards:
            places, named = arguments(shard)
            value = f(*places, method=case.methods.get(group, "forward"), **named)
            for step in () if case.output is None else str(case.output).split("."):
                value = value[int(step)] if step.isdigit() else value[step]
            if case.readout is not None:
                value = case.readout(value, shard)
            zs.setdefault(group, []).append(value)
    return zs


def remote_outputs(case: Case, f: Any) -> dict[str, list[Any]]:
    """Call a remote model on all shards of a case."""
    return {
        group: [getattr(f, case.methods.get(group, "forward"), f)(shard) for shard in shards]
        for group, shards in case.groups.items()
    }


def loss_of(case: Case, zs: dict[str, list[Any]]) -> Tensor:
    """Evaluate a case's loss as plain Python."""
    joined = {group: _joined(listed) for group, listed in zs.items()}
    if len(joined) == 1:
        return case.loss(*joined.values(), **case.loss_inputs)
    return case.loss(**joined, **case.loss_inputs)


def _joined(zs: Sequence[Any]) -> Any:
    if isinstance(zs[0], dict):
        return {name: torch.cat([z[name] for z in zs]) for name in zs[0]}
    return torch.stack(list(zs)) if zs[0].ndim == 0 else torch.cat(list(zs))
