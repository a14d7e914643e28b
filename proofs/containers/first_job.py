"""One job from outside the containers, compared with a backward pass here."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor

from gradbox import GradClient, Gradient
from proofs.containers.compose import ROOT

URL = "http://127.0.0.1:8642"
READY_WITHIN_S = 180.0


def spread(z: Tensor) -> Tensor:
    """A loss that couples all shards: the summed variance of the outputs over the samples."""
    return ((z - z.mean(0)) ** 2).sum()


def wait_until_ready() -> None:
    """Return once the box says that jobs can run.

    Raises:
        TimeoutError: it did not within `READY_WITHIN_S`; the message holds its last answer.
    """
    deadline, last = time.monotonic() + READY_WITHIN_S, "no answer"
    while time.monotonic() < deadline:
        try:
            answer = httpx.get(f"{URL}/readyz", timeout=5)
        except httpx.TransportError as error:
            last = repr(error)
        else:
            last = answer.text
            if answer.is_success and answer.json().get("workers", 1):
                return
        time.sleep(0.5)
    raise TimeoutError(f"{URL}/readyz within {READY_WITHIN_S:g} s: {last}")


def largest_difference(token: str) -> float:
    """Submit a `Gradient` of the example model; return its largest difference from autograd's."""
    torch.manual_seed(1)
    shards = [torch.randn(size, 8) for size in (3, 3, 2)]
    with GradClient(URL, token) as client:
        result = client.submit(Gradient(model="two-layers", inputs=shards, loss=spread)).result()
        model = _example_model(ROOT / "deploy" / "models" / "two_layers.py").eval()
        spread(torch.cat([model(x) for x in shards])).backward()
        return max(
            float((result.grads[name] - parameter.grad).abs().max())
            for name, parameter in model.named_parameters()
        )


def _example_model(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("two_layers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build()
