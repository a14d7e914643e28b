"""Who computes the gradient: naive code, public implementations, gradbox's engine.

A peer's `load` makes a step: a callable that computes one gradient from scratch and returns it by
the parameter's name in the transformer. `streams` says by which random numbers its dropout draws,
so that the reference can draw the same.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.workloads import SEED, TOWERS, Encoder, Workload, gradients
from gradbox.losses import info_nce
from gradbox_engine import Group, Objective, set_gradient, shard_stream
from gradbox_worker.demo.task import model_folder

Grads = dict[str, Tensor]
Step = Callable[[], Grads]
Streams = Literal["whole batch", "in order", "by shard"]


class Unavailable(Exception):
    """A peer cannot run here; the message says how to get it."""


@dataclass(frozen=True)
class Peer:
    """One way to compute the gradient."""

    name: str
    load: Callable[[Workload], Step]
    streams: Streams


def naive(workload: Workload) -> Step:
    """One forward over the whole batch, one backward."""
    encoder = Encoder()

    def step() -> Grads:
        encoder.zero_grad(set_to_none=True)
        torch.manual_seed(SEED)
        info_nce(*(encoder(**workload.batches[tower]) for tower in TOWERS)).backward()  # type: ignore[no-untyped-call]
        return gradients(encoder.model)

    return step


def grad_cache(workload: Workload) -> Step:
    """GradCache (Gao et al. 2021) as its authors publish it."""
    with _import_path(os.environ.get("GRADCACHE_SOURCE")):
        if importlib.util.find_spec("grad_cache") is None:
            raise Unavailable(
                "not measured: PyPI's package of that name cannot be imported; clone "
                "github.com/luyug/GradCache and set GRADCACHE_SOURCE to its src folder"
            )
        from grad_cache import GradCache
    encoder = Encoder()
    cache = GradCache(
        models=[encoder, encoder],
        chunk_sizes=workload.shard,
        loss_fn=info_nce,
    )

    def step() -> Grads:
        encoder.zero_grad(set_to_none=True)
        torch.manual_seed(SEED)
        cache(*(workload.batches[tower] for tower in TOWERS))
        return gradients(encoder.model)

    return step


def sentence_transformers(workload: Workload) -> Step:
    """sentence-transformers' CachedMultipleNegativesRankingLoss, at the scale of the same loss."""
    if importlib.util.find_spec("sentence_transformers") is None:
        raise Unavailable("not measured: pip install 'gradbox[bench]'")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.losses import CachedMultipleNegativesRankingLoss

    model = SentenceTransformer(str(model_folder()), device="cpu").train()
    loss = CachedMultipleNegativesRankingLoss(model, scale=20.0, mini_batch_size=workload.shard)

    def step() -> Grads:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(SEED)
        features: Any = [dict(workload.batches[tower]) for tower in TOWERS]
        loss(features, None).backward()
        return gradients(model, prefix="0.model.")

    return step


def gradbox(workload: Workload) -> Step:
    """gradbox's engine, keeping no graphs."""
    encoder = Encoder()
    groups = [Group(name=tower, shards=workload.shards[tower]) for tower in TOWERS]

    def step() -> Grads:
        answer = set_gradient(
            encoder, groups, Objective(function=info_nce), seed=SEED, mode="train", retain=0
        )
        return {name.removeprefix("model."): grad for name, grad in answer.grads.items()}

    return step


NAIVE = Peer("naive", naive, "whole batch")
GRAD_CACHE = Peer("GradCache", grad_cache, "in order")
SENTENCE_TRANSFORMERS = Peer("sentence-transformers", sentence_transformers, "in order")
GRADBOX = Peer("gradbox", gradbox, "by shard")
PEERS = (NAIVE, GRAD_CACHE, SENTENCE_TRANSFORMERS, GRADBOX)


def reference(workload: Workload, streams: Streams) -> Grads:
    """Return the gradient over one graph of all shards, with a peer's own dropout masks."""
    if streams == "whole batch":
        return naive(workload)()
    encoder = Encoder()
    torch.manual_seed(SEED)
    embeddings = []
    for group, tower in enumerate(TOWERS):
        outputs = []
        for index, shard in enumerate(workload.shards[tower]):
            if streams == "by shard":
                with shard_stream(SEED, group, index):
                    outputs.append(encoder(**shard))
            else:
                outputs.append(encoder(**shard))
        embeddings.append(torch.cat(outputs))
    info_nce(*embeddings).backward()  # type: ignore[no-untyped-call]
    return gradients(encoder.model)


@contextmanager
def _import_path(folder: str | None) -> Iterator[None]:
    if folder is None:
        yield
        return
    if not Path(folder, "grad_cache").is_dir():
        raise Unavailable(f"not measured: GRADCACHE_SOURCE={folder} holds no folder grad_cache")
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
