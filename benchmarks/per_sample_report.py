"""The page on per-sample gradients and Jacobians, and the bars it holds them to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.page import table, verdict
from benchmarks.per_sample import WARM, Measured

Bars = Mapping[str, float]
BARS: Mapping[tuple[str, str], Bars] = {
    ("W1", WARM): {"later shard": 0.80},
    ("W2 B=2", WARM): {"later shard": 3.0},
    ("W4", WARM): {"later shard": 0.75},
    ("W5", WARM): {"later shard": 4.6},
}
SIZES: Mapping[str, float] = {"W1": 140, "W2 B=2": 140, "W2 B=256": 140, "W4": 18}
OURS = ("dense", "norms", "gram", "vjp", "factors")
PEERS = ("loop", "vmap", "ExpandedWeights", "Opacus", "BackPACK")
WHAT = {
    "W1": "50 layers of 300 units, B = 100",
    "W2 B=2": "784-20-10, Jacobian of 10 outputs, B = 2",
    "W2 B=256": "the same, B = 256",
    "W3": "convolutions with group norm, B = 64, 32 × 32",
    "W4": "all-MiniLM-L6-v2, B = 16, 32 tokens",
    "W5": "residual network, batch norm in eval mode, Jacobian of 10 outputs, B = 16",
}


def per_sample_section(found: Sequence[Measured]) -> str:
    """Describe the per-sample benchmark."""
    lines = [
        "## Per-sample gradients and Jacobians",
        "",
        "CPU time to one summed forward and backward of the same batch, minima over interleaved "
        "rounds, one thread, each row a process. *warm*: the heap keeps what is freed; *stock*: "
        "glibc as it is, every large array in fresh pages. gradbox is called as its users call it, "
        "on one shard, checks included; `later shard`: the factors of a further shard of the same "
        "job. First and second call: wall time of the factors in a fresh process.",
        "",
        *(f"- {name}: {what}" for name, what in WHAT.items()),
        "",
        *table(
            ["gradbox", "base ms", *OURS, "later shard", "floor", "first ms", "second ms"],
            map(_own_row, found),
        ),
        "",
        "The floor: the base, and the bytes of the result at the speed of a copy between buffers "
        "in use. A copy reads what it writes and a product of factors does not, so rows may cost "
        "less.",
        "",
        *table(["dense, by", "gradbox", *PEERS], map(_peer_row, found)),
        "",
        *_absences(found),
        "",
        *table(["file of the smaller form", "MiB", "dense MiB", "dense / file"], _size_rows(found)),
        "",
        *(f"- {line}" for line in verdicts(found)),
    ]
    return "\n".join(lines)


def verdicts(found: Sequence[Measured]) -> list[str]:
    """Say which of the bars are met."""
    lines = []
    for one in found:
        for method, bar in BARS.get((one.workload, one.heap), {}).items():
            ratio = one.later_shard if method == "later shard" else one.ratio(method)
            if ratio is not None:
                sentence = f"{_title(one)}, {method}: {ratio:.3g}, bar {bar:g}"
                lines.append(verdict(ratio <= bar, sentence))
        if one.heap == WARM and one.workload in SIZES:
            smaller = one.dense_bytes / one.factored_bytes
            sentence = (
                f"{one.workload}, file: 1/{smaller:.4g} of dense, bar 1/{SIZES[one.workload]:g}"
            )
            lines.append(verdict(smaller >= SIZES[one.workload], sentence))
        best = _best_peer(one)
        ours = one.ratio("dense")
        if best is not None and ours is not None:
            name, theirs = best
            sentence = f"{_title(one)}, dense: {ours:.3g}, best peer {theirs:.3g} ({name})"
            lines.append(verdict(ours <= theirs, sentence))
    return lines


def _best_peer(one: Measured) -> tuple[str, float] | None:
    ratios = [(ratio, name) for name in PEERS if (ratio := one.ratio(name)) is not None]
    return min(ratios)[::-1] if ratios else None


def _title(one: Measured) -> str:
    return f"{one.workload} {one.heap}"


def _cell(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.3g}"


def _own_row(one: Measured) -> list[str]:
    cells = [_cell(one.ratio(method)) for method in OURS]
    base_ms = f"{one.seconds['base'] * 1e3:.2f}"
    first = [f"{seconds * 1e3:.0f}" for seconds in one.first_calls_s] or ["–", "–"]
    return [_title(one), base_ms, *cells, _cell(one.later_shard), f"{one.floor:.3g}", *first]


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
