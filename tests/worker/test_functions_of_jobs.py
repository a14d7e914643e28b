"""Functions of a job, as the engine is given them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from gradbox.protocol import TracedFunction
from gradbox.tracing.trace import trace
from gradbox_service.store import BlobStore
from gradbox_worker.computations.engine_inputs import build_function
from gradbox_worker.files.blob_tensors import BlobTensors

HOST = torch.device("cpu")


def twice(output: Tensor) -> Tensor:
    return 2 * output


def thrice(output: Tensor) -> Tensor:
    return 3 * output


def test_functions_of_the_same_graph_are_one_key(tmp_path: Path) -> None:
    """Plans of per-sample jobs are kept by their readout, for jobs to come."""
    traced = (trace(function, positional=1) for function in (twice, twice, thrice))
    graphs = [TracedFunction(graph=found.graph, tensors={}) for found in traced]
    with BlobTensors(BlobStore(tmp_path), device=HOST) as tensors:
        first, again, other = (
            build_function(g, tensors, device=HOST, widened=False).function for g in graphs
        )
        wide = build_function(graphs[0], tensors, device=HOST, widened=True).function
    assert {first: "plan"}.get(again) == "plan"
    assert not {other, wide} & {first}
    assert torch.equal(again(torch.ones(2)), torch.full((2,), 2.0))
