"""The page on per-sample gradients and Jacobians, and the bars it holds them to."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.page import section, table, verdict
from benchmarks.per_sample.times import COMPARED, EIGHT, RUNS, WARM, Measured

Bars = Mapping[str, float]
BARS: Mapping[tuple[str, str], Bars] = {
    ("W1", WARM): {"later shard": 0.80},
    ("W2 B=2", WARM): {"later shard": 3.0},
    ("W4", WARM): {"later shard": 0.75},
    ("W5", WARM): {"later shard": 4.6},
}
SIZES: Mapping[str, float] = {"W1": 140, "W2 B=2": 140, "W2 B=256": 140, "W4": 18}
OURS = ("dense", COMPARED, "norms", "gram", "vjp", "factors")
PEERS = ("loop", "vmap", "ExpandedWeights", "Opacus", "BackPACK")
WHAT = {
    "W1": "50 layers of 300 units, B = 100",
    "W2 B=2": "784-20-10, Jacobian of 10 outputs, B = 2",
    "W2 B=256": "the same, B = 256",
    "W3": "convolutions with group norm, B = 64, 32 × 32",
    "W4": "all-MiniLM-L6-v2, B = 16, 32 tokens",
    "W5": "residual network, batch norm in eval mode, Jacobian of 10 outputs, B = 16",
    "Llama": "2 M parameters, random weights, B = 8, 32 tokens; Bert, GPT2 and ViT (48 × 48) alike",
}


def per_sample_section(found: Sequence[Measured]) -> str:
    """Describe the per-sample benchmark."""
    return section(
        "Per-sample gradients and Jacobians",
        "Wall time to one summed forward and backward of the same batch, one thread: medians of "
        "rounds in which the base and the calls take turns, and of these the median of "
        f"{RUNS} runs. *warm*: the heap keeps what is freed; *stock*: glibc as it is, every large "
        "array in new pages; the same for everybody. gradbox is called as its users call it, on "
        "one shard, checks included; its dense rows, its other results and each peer have "
        "processes of their own. `dense` compares no row where a job of so few samples need not: "
        "one of n < 64 does with probability n / 64. `of eight shards`: dense rows of a shard in a "
        "job of eight. `later shard`: the factors of a further shard of the same job. "
        "A first call is the first thing that its process computes, after the imports that a "
        "device process makes at its start. A bar is met if it is in each of the runs.",
        [f"- {name}: {what}" for name, what in WHAT.items()],
        table(
            ["gradbox", "base ms", *OURS, "of eight shards", "later shard", "floor"],
            map(_own_row, found),
        ),
        "The floor: the base, and the bytes of the result at the speed of a copy between buffers "
        "in use. A copy reads what it writes and a product of factors does not, so rows may cost "
        "less.",
        table(["dense, by", "gradbox", *PEERS], map(_peer_row, found)),
        table(
            ["first call, dense ms", "gradbox", *PEERS, "gradbox's second"], map(_first_row, found)
        ),
        _absences(found),
        table(["file of the smaller form", "MiB", "dense MiB", "dense / file"], _size_rows(found)),
        [f"- {line}" for line in verdicts(found)],
    )


def verdicts(found: Sequence[Measured]) -> list[str]:
    """Say which of the bars are met."""
    lines = []
    for one in found:
        for method, bar in BARS.get((one.workload, one.heap), {}).items():
            later = method == "later shard"
            ratios = one.later_shards if later else one.ratios.get(method, [])
            if ratios:
                sentence = f"{_title(one)}, {method}: {_runs(ratios)}, bar {bar:g}"
                lines.append(verdict(max(ratios) <= bar, sentence))
        if one.heap == WARM and one.workload in SIZES:
            smaller = one.dense_bytes / one.factored_bytes
            sentence = (
                f"{one.workload}, file: 1/{smaller:.4g} of dense, bar 1/{SIZES[one.workload]:g}"
            )
            lines.append(verdict(smaller >= SIZES[one.workload], sentence))
        best = _best_peer(one)
        ours = one.ratios.get("dense")
        if best is not None and ours:
            name, theirs = best
            sentence = f"{_title(one)}, dense: {_runs(ours)}, best peer {_runs(theirs)} ({name})"
            lines.append(verdict(max(ours) <= min(theirs), sentence))
            if eight := [ratio / 8 for ratio in one.ratios.get(EIGHT, [])]:
                sentence = f"{_title(one)}, of eight shards: {_runs(eight)}, best peer as above"
                lines.append(verdict(max(eight) <= min(theirs), sentence))
        lines += _first_calls(one)
    return lines


def _first_calls(one: Measured) -> list[str]:
    """Hold first calls to the second and one forward and two backward passes, and to the loop."""
    forward_s, base_s = statistics.median(one.forward_s), statistics.median(one.base_s)
    bar_ms = (2 * base_s - forward_s) * 1e3
    lines = []
    for method in ("dense", "factors"):
        firsts, seconds = one.first_s.get(method, []), one.second_s.get(method, [])
        more_ms = [(first - s) * 1e3 for first, s in zip(firsts, seconds, strict=True)]
        if more_ms:
            sentence = f"{_title(one)}, first call beyond the second, {method}: {_runs(more_ms)} ms"
            lines.append(verdict(max(more_ms) <= bar_ms, f"{sentence}, bar {bar_ms:.3g}"))
    ours, loops = ([s * 1e3 for s in one.first_s.get(name, [])] for name in ("dense", "loop"))
    if ours and loops:
        sentence = f"{_title(one)}, first dense call: {_runs(ours)} ms, the loop {_runs(loops)}"
        lines.append(verdict(max(ours) < min(loops), sentence))
    return lines


def _best_peer(one: Measured) -> tuple[str, list[float]] | None:
    measured = {name: one.ratios[name] for name in PEERS if one.ratios.get(name)}
    return min(measured.items(), key=lambda item: min(item[1]), default=None)


def _runs(values: Sequence[float]) -> str:
    """Return the median, and from where to where the runs go."""
    middle = statistics.median(values)
    return f"{middle:.3g} ({min(values):.3g} to {max(values):.3g})"


def _title(one: Measured) -> str:
    return f"{one.workload} {one.heap}"


def _cell(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.3g}"


def _own_row(one: Measured) -> list[str]:
    cells = [_cell(one.ratio(method)) for method in OURS]
    base_ms = f"{statistics.median(one.base_s) * 1e3:.2f}"
    later = statistics.median(one.later_shards) if one.later_shards else None
    return [_title(one), base_ms, *cells, _cell(one.of_eight), _cell(later), f"{one.floor:.3g}"]


def _first_row(one: Measured) -> list[str]:
    firsts = [one.first_s.get(name) for name in ("dense", *PEERS)]
    cells = [
        f"{statistics.median(found) * 1e3:.0f}" if found else "–"
        for found in (*firsts, one.second_s.get("dense"))
    ]
    return [_title(one), *cells]


def _peer_row(one: Measured) -> list[str]:
    return [_title(one), _cell(one.ratio("dense")), *(_cell(one.ratio(peer)) for peer in PEERS)]


def _absences(found: Sequence[Measured]) -> list[str]:
    return [
        f"- {one.workload}: {name} gives nothing: {why}"
        for one in found
        if one.heap == WARM
        for name, why in one.absent.items()
    ]


def _size_rows(found: Sequence[Measured]) -> list[list[str]]:
    return [
        [
            one.workload,
            f"{one.factored_bytes / 2**20:.3g}",
            f"{one.dense_bytes / 2**20:.4g}",
            f"{one.dense_bytes / one.factored_bytes:.4g}",
        ]
        for one in found
        if one.heap == WARM
    ]
