"""Scores and rows of stores, by the public API of a box."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor

from benchmarks.attribution.peers import BATCH, PASSES, Scores
from benchmarks.attribution.tasks import SKETCHES, Task
from benchmarks.box.small_jobs import Meter
from gradbox import GradClient, InverseHessian, PerSampleGradient, Rademacher

CG_STEPS: Final = 500
CG_TOLERANCE: Final = 1e-4


def box_scores(client: GradClient, task: Task, weights: Path) -> Scores:
    """Return the scores of a task's training samples for its queries by each method, (Q, N)."""
    asked: dict[str, Any] = {
        "inputs": [task.query_x],
        "loss": task.loss,
        "loss_inputs": {"targets": task.query_y},
    }
    store = client.store(f"{task.name}-whole", model=task.name, dtype="fp32")
    store.add(**_training(task), loss=task.loss, ids=range(len(task.x)))
    scores = {"dot": store.scores(**asked), "cosine": store.scores(**asked, unit_norm=True)}

    x, y = task.fisher_samples(weights)
    for kind in ("kfac", "ekfac"):
        drawn: dict[str, Any] = {"inputs": list(x.split(BATCH)), "loss_inputs": {"targets": y}}
        store.fit(kind, **drawn, loss=task.loss, damping=task.decay)
        scores[kind] = store.scores(**asked, precondition=kind)

    scores["trak"] = torch.stack([_trak(client, task, n, asked) for n in range(SKETCHES)]).mean(0)

    vectors = client.run(PerSampleGradient(model=task.name, **asked, form="dense")).grads
    solved = {
        "hessian": _by_cg(client, task, vectors, kind="hessian", damping=task.hessian_damping),
        "ggn": _by_cg(client, task, vectors, kind="ggn", damping=task.decay),
    }
    return scores | {kind: found @ store.rows[:].T for kind, found in solved.items()}


def _by_cg(
    client: GradClient,
    task: Task,
    vectors: Any,
    *,
    kind: Literal["hessian", "ggn"],
    damping: float,
) -> Tensor:
    """Return (C + damping I)⁻¹ v of each vector, C of the mean loss, (Q, P)."""
    solve = InverseHessian(
        model=task.name,
        inputs=[task.x],
        loss_inputs={"targets": task.y},
        loss=lambda z, targets: task.loss(z, targets).mean(),
        vectors=vectors,
        kind=kind,
        damping=damping,
        max_iterations=CG_STEPS,
        tolerance=CG_TOLERANCE,
    )
    flat: Tensor = client.run(solve).flat()
    return flat


def _trak(client: GradClient, task: Task, seed: int, asked: dict[str, Any]) -> Tensor:
    """Return TRAK's scores by one projection, (Q, N): rows of the output, its slope as weights."""
    store = client.store(
        f"{task.name}-trak-{seed}",
        model=task.name,
        projection=Rademacher(task.sketch_dim),
        dtype="fp32",
        seed=seed,
    )
    store.add(**_training(task), loss=task.output, ids=range(len(task.x)))
    store.fit("kernel", damping=task.kernel_damping)
    slopes = task.slope(torch.tensor(store.losses()), task.y)
    scores: Tensor = store.scores(**asked, precondition="kernel")
    return scores * slopes


def box_seconds(client: GradClient, meter: Meter, task: Task, projection: Any) -> float:
    """Return the processor time of all processes for the fastest `store.add` of all samples."""
    name, wrt = f"{task.name}-{type(projection).__name__}", task.wrt
    store = client.store(name, model=task.name, wrt=wrt, projection=projection, dtype="fp32")
    meter.rest()
    seconds = []
    for turn in range(PASSES + 1):  # one more: the first builds the model
        first = turn * len(task.x)
        before = sum(meter.cpu_ms().values())
        store.add(**_training(task), loss=task.loss, ids=range(first, first + len(task.x)))
        seconds.append((sum(meter.cpu_ms().values()) - before) / 1e3)
    return min(seconds[1:])


def _training(task: Task) -> dict[str, Any]:
    return {"inputs": list(task.x.split(BATCH)), "loss_inputs": {"targets": task.y}}
