"""The replay benchmark's section: its tables, and the bars."""

from __future__ import annotations

from benchmarks.page import mebibytes, section, table, verdict
from benchmarks.replay.replay import Replay
from benchmarks.set_loss.peers import GRADBOX
from benchmarks.set_loss.public_peers import GRAD_CACHE, PEERS
from benchmarks.set_loss.workloads import NUM_TOKENS

TIME_ALLOWANCE = 1.03  # on the bound (2F + B)/(F + B)
FLATNESS = 0.10


def replay_section(found: Replay) -> str:
    """Describe the replay benchmark."""
    plan, cost = found.plan, found.cost
    return section(
        "Replay",
        f"InfoNCE over pairs of real text through all-MiniLM-L6-v2 in train mode, shard "
        f"{plan.shard}, {NUM_TOKENS} tokens, {plan.threads} thread(s). Time at "
        f"{plan.timed_pairs} pairs, medians of {plan.rounds} interleaved rounds. One shard's "
        f"forward takes {cost.forward:.3f} s, its backward {cost.backward:.3f} s of CPU: replaying "
        f"every shard is bound by (2F + B)/(F + B) = {cost.bound:.3f} of naive.",
        table(
            ["", "CPU time to naive", "wall time to naive", "CPU s", "relative error"],
            [_timing_row(found, peer.name) for peer in PEERS],
        ),
        "Relative error: against one graph over all shards with the same dropout masks.",
        "Peak memory beyond the loaded model, MiB, one step in a fresh process:",
        table(
            ["pairs", *(str(num) for num in plan.memory_pairs)],
            [_memory_row(found, peer.name) for peer in PEERS if peer.name in found.memory],
        ),
        [f"- {line}" for line in verdicts(found)],
    )


def verdicts(found: Replay) -> list[str]:
    """Say which of the bars are met."""
    ours, lines = found.timings[GRADBOX.name], []
    allowed = TIME_ALLOWANCE * found.cost.bound
    lines.append(
        verdict(
            ours.cpu_ratio <= allowed,
            f"gradbox's time is {ours.cpu_ratio:.3f} of naive, allowed {TIME_ALLOWANCE} × bound = "
            f"{allowed:.3f}",
        )
    )
    if GRAD_CACHE.name in found.timings:
        theirs = found.timings[GRAD_CACHE.name].cpu_ratio
        lines.append(
            verdict(
                ours.cpu_ratio <= theirs,
                f"gradbox's time is {ours.cpu_ratio:.3f} of naive, GradCache's {theirs:.3f}",
            )
        )
    peaks = [peak for peak in found.memory[GRADBOX.name].values() if peak is not None]
    apart = max(peaks) / min(peaks) - 1
    lines.append(
        verdict(
            apart <= FLATNESS,
            f"gradbox's peak memory varies by {apart:.1%} from "
            f"{min(found.plan.memory_pairs)} to {max(found.plan.memory_pairs)} pairs, allowed "
            f"{FLATNESS:.0%}",
        )
    )
    return lines


def _timing_row(found: Replay, name: str) -> list[str]:
    timing = found.timings.get(name)
    if timing is None:
        return [name, found.absent[name], "", "", ""]
    return [
        name,
        f"{timing.cpu_ratio:.3f}",
        f"{timing.wall_ratio:.3f}",
        f"{timing.cpu_s:.2f}",
        f"{timing.error:.1e}",
    ]


def _memory_row(found: Replay, name: str) -> list[str]:
    cells = [name]
    for num_pairs in found.plan.memory_pairs:
        known = num_pairs in found.memory[name]
        cells.append(mebibytes(found.memory[name][num_pairs]) if known else "not run")
    return cells
