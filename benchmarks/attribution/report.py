"""What is compared, and with which bars: scores beside peers', retrained models, rows a second."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.attribution.box import box_scores, box_seconds
from benchmarks.attribution.peers import (
    ABSENT,
    BATCH,
    CG_STEPS,
    LAYER_DIM,
    SCORES,
    Scores,
    installed,
    peer_scores,
    peer_seconds,
    versions,
)
from benchmarks.attribution.retrained import SEEDS, Retrained, retrain, spearman
from benchmarks.attribution.tasks import (
    DRAWS,
    HESSIAN_DAMPING,
    NUM_TEXTS,
    SKETCH_DIM,
    SKETCHES,
    TASKS,
    TEXT_BYTES,
    Task,
)
from benchmarks.box.small_jobs import Meter, metered_box
from benchmarks.page import section, table, verdicts
from gradbox import GradClient, PerLayer, Rademacher

COMPARED: Final = ("digits", "diabetes")
WIDE, TEXTS = "wide", "texts"
METHODS: Final[Mapping[str, str]] = {
    "dot": "dot product",
    "cosine": "cosine",
    "kfac": "K-FAC",
    "ekfac": "EK-FAC",
    "trak": "TRAK",
    "hessian": "Hessian, by CG",
    "ggn": "Gauss-Newton, by CG",
}
LEAST_SPEARMAN, LEAST_OF_TRAK = 0.99, 0.95  # whose random signs differ
MOST_APART: Final = 0.03
LEAST_GAIN: Final = 2.0
# Who makes rows of which task.
Who = tuple[str, str]
SIGNS, LAYERS = (WIDE, "gradbox, Rademacher"), (WIDE, "gradbox, PerLayer")
LAYERS_OF_TEXTS = (TEXTS, "gradbox, PerLayer")
OURS: Final[Mapping[Who, tuple[str, Any]]] = {
    SIGNS: ("signs, all layers together", Rademacher(SKETCH_DIM)),
    LAYERS: ("signs, each layer on both sides", PerLayer(LAYER_DIM)),
    LAYERS_OF_TEXTS: ("signs, each layer on both sides", PerLayer(LAYER_DIM)),
}
# What each peer does for a row, and which of gradbox's stands beside it.
BESIDE: Final[Mapping[Who, tuple[str, Who]]] = {
    (WIDE, "TRAK"): ("signs, all layers together", SIGNS),
    (WIDE, "bergson"): ("signs, each layer on both sides", LAYERS),
    (WIDE, "kronfluence"): ("no projection; keeps the sum of squares alone", LAYERS),
    (TEXTS, "bergson"): ("signs, each layer on both sides", LAYERS_OF_TEXTS),
}


@dataclass(frozen=True)
class Compared:
    """Scores of one method, and a peer's where one has it.

    Attributes:
        lds: the linear datamodeling score.
        spearman: the mean over queries of the correlation of both; `least` is the least.
    """

    task: str
    method: str
    lds: float
    peer: str = ""
    peer_lds: float | None = None
    spearman: float | None = None
    least: float | None = None


@dataclass(frozen=True)
class Attribution:
    """What was measured: scores, rows a second of processor time, the peers, the machine's load."""

    compared: list[Compared]
    rates: dict[Who, float]
    versions: str
    load: float


def measure_attribution(*, num_subsets: int) -> Attribution:
    """Run the benchmark."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    tasks = {name: make() for name, make in TASKS.items()}
    compared: list[Compared] = []
    with tempfile.TemporaryDirectory(prefix="gradbox-attribution-") as name:
        weights = {task: Path(name) / f"{task}.safetensors" for task in tasks}
        entries = [tasks[task].entry(file) for task, file in weights.items()]
        with metered_box(Path(name), registered="\n".join(entries)) as (client, meter):
            ours = {one: box_scores(client, tasks[one], weights[one]) for one in COMPARED}
            rates = _rates(client, meter, tasks, weights)
        for one in COMPARED:
            there = filter(installed, SCORES)
            theirs = {peer: peer_scores(peer, tasks[one], weights[one]) for peer in there}
            retrained = retrain(tasks[one], num_subsets=num_subsets)
            compared += _compared(one, ours[one], theirs, retrained)
    return Attribution(compared, rates, versions(), os.getloadavg()[0])


def _rates(
    client: GradClient, meter: Meter, tasks: Mapping[str, Task], weights: Mapping[str, Path]
) -> dict[Who, float]:
    seconds = {
        who: box_seconds(client, meter, tasks[who[0]], projection)
        for who, (_, projection) in OURS.items()
    }
    for task, peer in BESIDE:
        if installed(peer):
            seconds[task, peer] = peer_seconds(peer, tasks[task], weights[task])
    return {who: len(tasks[who[0]].x) / taken for who, taken in seconds.items()}


def _compared(
    task: str, ours: Scores, theirs: dict[str, Scores], retrained: Retrained
) -> Iterator[Compared]:
    for method, scores in ours.items():
        lds = retrained.lds(scores)
        peer = next((name for name, found in theirs.items() if method in found), None)
        if peer is None:
            yield Compared(task, method, lds)
            continue
        agreed = spearman(scores, theirs[peer][method])
        peer_lds, mean, least = retrained.lds(theirs[peer][method]), agreed.mean(), agreed.min()
        yield Compared(task, method, lds, peer, peer_lds, float(mean), float(least))


def attribution_section(found: Attribution) -> str:
    """Describe the benchmark."""
    scores = [
        [
            f"{one.task}: {METHODS[one.method]}",
            f"{one.lds:.3f}",
            one.peer,
            *("" if x is None else f"{x:.{n}f}" for x, n in _beside(one)),
        ]
        for one in found.compared
    ]
    rates = [
        [*who, does, f"{found.rates[who]:,.0f}" if who in found.rates else ABSENT]
        for of_whom in (OURS, BESIDE)
        for who, (does, _) in of_whom.items()
    ]
    return section(
        "Influence beside peers",
        "An MLP on scikit-learn's digits (1,200 training samples, 100 queries) and one on its "
        "diabetes (342, 100), trained here. Stores of float32 rows; damping is the weight decay "
        f"that the models were trained with, {HESSIAN_DAMPING} times that for the Hessian. Peers: "
        f"{found.versions or ABSENT}. Load of the machine {found.load:.1f}.",
        "LDS, the linear datamodeling score: Spearman's correlation, over half subsets, of the sum "
        "of a subset's scores with the loss of models trained on it, whose sign is turned; the "
        f"mean over queries. Losses are means over {SEEDS} initialisations. Beside it Spearman's "
        "correlation of a query's scores by gradbox and by the peer, the mean and the least.",
        table(["scores", "LDS", "peer", "LDS of the peer", "correlation", "least"], scores),
        f"K-FAC and EK-FAC are of the Fisher on targets that the model draws, {DRAWS} a sample, "
        f"the same ones for both. TRAK's scores are means over {SKETCHES} "
        "projections to as many numbers, 1024 and 256, whose random signs are not the peer's. "
        f"dattri's CG takes {CG_STEPS} steps in float64.",
        f"Rows of 12,000 digits through an MLP of 26,000 parameters (wide), and of {NUM_TEXTS} "
        f"texts of {TEXT_BYTES} bytes through the linear layers of a transformer of 3.2 million "
        f"(texts), in batches of {BATCH}, to {SKETCH_DIM} numbers or {LAYER_DIM} × {LAYER_DIM} of "
        "each layer, by the processor time of the fastest pass. Those of gradbox go through the "
        "box into a store, with their checksums: the time is that of all its processes and of the "
        "client.",
        table(["task", "rows", "", "a second"], rates),
        verdicts(_bars(found)),
    )


def _beside(one: Compared) -> list[tuple[float | None, int]]:
    return [(one.peer_lds, 3), (one.spearman, 4), (one.least, 4)]


def _bars(found: Attribution) -> list[tuple[bool, str]]:
    bars = []
    for one in found.compared:
        if one.peer_lds is None or one.spearman is None:
            continue
        called = f"{one.task}, {METHODS[one.method]}"
        least = LEAST_OF_TRAK if one.method == "trak" else LEAST_SPEARMAN
        apart = abs(one.lds - one.peer_lds)
        bars += [
            (one.spearman >= least, f"{called}: correlation {one.spearman:.4f}, at least {least}"),
            (apart <= MOST_APART, f"{called}: LDS {apart:.3f} apart, allowed {MOST_APART}"),
        ]
    lds = {one.method: one.lds for one in found.compared if one.task == COMPARED[0]}
    gain = lds["ekfac"] / lds["dot"]
    sentence = f"EK-FAC's LDS is {gain:.2f} of the dot product's, at least {LEAST_GAIN:.0f}"
    bars.append((gain >= LEAST_GAIN, f"{COMPARED[0]}: {sentence}"))
    for who, (_, beside) in BESIDE.items():
        if who in found.rates:
            ratio, (task, ours) = found.rates[beside] / found.rates[who], beside
            sentence = f"{task}: {ours}: {ratio:.2f} of the rows a second of {who[1]}"
            bars.append((ratio >= 1, sentence))
    return bars
