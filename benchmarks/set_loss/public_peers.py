"""Public implementations, as their authors publish them, or written from their description."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from benchmarks.set_loss.pairs import TOWERS
from benchmarks.set_loss.peers import (
    GRADBOX,
    NAIVE,
    SHARDED,
    Outcome,
    Peer,
    Step,
    Unavailable,
    keeping,
    outcome,
    sharded,
)
from benchmarks.set_loss.workloads import SEED, Workload, gradients
from gradbox.losses import info_nce
from gradbox_worker.demo.task import model_folder

aten = torch.ops.aten

SAVED_OPERATIONS = [
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
]


def grad_cache(workload: Workload) -> Step:
    """GradCache (Gao et al. 2021) as its authors publish it."""
    with _import_path(os.environ.get("GRADCACHE_SOURCE")):
        if importlib.util.find_spec("grad_cache") is None:
            raise Unavailable(
                "not measured: PyPI's package of that name cannot be imported; clone "
                "github.com/luyug/GradCache and set GRADCACHE_SOURCE to its src folder"
            )
        from grad_cache import GradCache
    encoder = workload.encoder()
    cache = GradCache(
        models=[encoder, encoder],
        chunk_sizes=workload.shard,
        loss_fn=info_nce,
    )

    def step() -> Outcome:
        encoder.zero_grad(set_to_none=True)
        torch.manual_seed(SEED)
        cache(*(workload.batches[tower] for tower in TOWERS))
        return outcome(encoder)

    return step


def sentence_transformers(workload: Workload) -> Step:
    """sentence-transformers' CachedMultipleNegativesRankingLoss, at the scale of the same loss."""
    _only_minilm(workload, "takes sentence encoders alone")
    if importlib.util.find_spec("sentence_transformers") is None:
        raise Unavailable("not measured: pip install 'gradbox[bench]'")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.losses import CachedMultipleNegativesRankingLoss

    model = SentenceTransformer(str(model_folder()), device=workload.device).train()
    loss = CachedMultipleNegativesRankingLoss(model, scale=20.0, mini_batch_size=workload.shard)

    def step() -> Outcome:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(SEED)
        features: Any = [dict(workload.batches[tower]) for tower in TOWERS]
        loss(features, None).backward()
        return Outcome(gradients(model, prefix="0.model."))

    return step


def open_clip(workload: Workload) -> Step:
    """Gradient accumulation as open_clip's README describes its --accum-freq.

    Embed all micro-batches without a graph; then each again with one, put its features in the place
    of the old, and differentiate the loss of all. Random states are not put back between the
    passes. A micro-batch is one shard of each tower.
    """
    encoder = workload.encoder()
    micro_batches = list(zip(*(workload.shards[tower] for tower in TOWERS), strict=True))

    def step() -> Outcome:
        encoder.zero_grad(set_to_none=True)
        torch.manual_seed(SEED)
        with torch.no_grad():
            cached = [[encoder(**shard) for shard in both] for both in micro_batches]
        for place, both in enumerate(micro_batches):
            rows = [*cached[:place], [encoder(**shard) for shard in both], *cached[place + 1 :]]
            info_nce(*(torch.cat(tower) for tower in zip(*rows, strict=True))).backward()
        return outcome(encoder)

    return step


def layer_checkpointing(workload: Workload) -> Step:
    """All graphs alive, but of each layer of MiniLM its input alone (Chen et al. 2016)."""
    _only_minilm(workload, "measured on MiniLM alone")
    return sharded(workload, partial(_checkpoint, options={}))


def selective_checkpointing(workload: Workload) -> Step:
    """The same, but results of matrix products and attention are kept as well."""
    _only_minilm(workload, "measured on MiniLM alone")
    contexts = partial(create_selective_checkpoint_contexts, SAVED_OPERATIONS)
    return sharded(workload, partial(_checkpoint, options={"context_fn": contexts}))


def _checkpoint(encoder: nn.Module, options: dict[str, Any]) -> None:
    model: Any = encoder.model
    model.gradient_checkpointing_enable({"use_reentrant": False, **options})


def _only_minilm(workload: Workload, reason: str) -> None:
    if workload.task != "minilm":
        raise Unavailable(reason)


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


GRAD_CACHE = Peer("GradCache", grad_cache, "in order")
SENTENCE_TRANSFORMERS = Peer("sentence-transformers", sentence_transformers, "in order")
OPEN_CLIP = Peer("open_clip accumulation", open_clip, "second pass")
LAYER_CHECKPOINTING = Peer("layer checkpointing", layer_checkpointing, "in order")
SELECTIVE_CHECKPOINTING = Peer("selective checkpointing", selective_checkpointing, "in order")

PEERS = (NAIVE, GRAD_CACHE, SENTENCE_TRANSFORMERS, GRADBOX)
OTHERS = (
    GRAD_CACHE,
    SENTENCE_TRANSFORMERS,
    OPEN_CLIP,
    LAYER_CHECKPOINTING,
    SELECTIVE_CHECKPOINTING,
)


def peer_named(name: str, *, kept: int) -> Peer:
    """Return a peer; `kept` is how many graphs gradbox may keep."""
    if name == GRADBOX.name:
        return keeping(kept)
    return next(peer for peer in (NAIVE, SHARDED, *OTHERS) if peer.name == name)
