"""The retention benchmark's section: tables of every setting, and the bars."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.page import mebibytes, section, table, verdict
from benchmarks.replay.retention import Point, Retention, Setting
from benchmarks.set_loss.peers import GRADBOX, SHARDED
from benchmarks.set_loss.public_peers import OTHERS

ALLOWANCE = 1.03  # on the naive sharded step, and on the bound (2F + B)/(F + B)
LINEARITY = 0.05
FLATNESS = 0.05  # to either side of the middle
EXACT = 1e-5  # float32

TITLES = {
    "minilm": "all-MiniLM-L6-v2, dropout on",
    "cnn": "residual network of 18 layers, batch norm in train mode",
    "lstm": "LSTM of two layers, dropout on",
}


def retention_section(found: Retention) -> str:
    """Describe the retention benchmark."""
    plan = found.plan
    clock = "CPU" if plan.device == "cpu" else "wall"
    return section(
        "Retention",
        f"InfoNCE over pairs, {plan.threads} thread(s), device {plan.device}; texts of "
        f"{plan.num_tokens} tokens. N counts the samples of both towers. Time is {clock} time to "
        "the naive sharded step, which is timed before and after every other: the rounds' median "
        "and its standard error; glibc is told to keep what is freed, so that nobody pays for "
        "fresh pages by chance. Peak memory is beyond the loaded model, MiB, of one step in a "
        "fresh process. *k kept* is a budget for k graphs; one more, the last shard's, is kept "
        "always; for all it is what is free. *Predicted* is 1 + F/(F + B) · (shards "
        "replayed)/(shards). The columns to the right are gradbox at a peer's peak memory.",
        *map(_setting, found.settings),
        "### Peak memory with nothing kept, MiB",
        _flat_table(found),
        "### Correctness",
        _correctness_table(found),
        "### Bars",
        [f"- {line}" for line in bars(found)],
    )


def bars(found: Retention) -> Iterator[str]:
    """Say which of the bars are met, each with the worst setting."""
    for task in found.plan.tasks:
        settings = [s for s in found.settings if s.workload.task == task]
        if settings:
            yield from _time_bars(task, settings)
    for (task, shard), peaks in found.flat.items():
        known = [peak for peak in peaks.values() if peak is not None]
        middle = (max(known) + min(known)) / 2
        apart = max(known) / middle - 1
        yield verdict(
            len(known) == len(peaks) and apart <= FLATNESS,
            f"{task}, shard {shard}: peak memory with nothing kept varies by ± {apart:.1%} from "
            f"{min(peaks)} to {max(peaks)} samples, allowed ± {FLATNESS:.0%}",
        )
    for task, peers in found.correctness.items():
        ours = peers[GRADBOX.name]
        yield verdict(
            ours.error <= EXACT and ours.updates_per_shard in (None, 1),
            f"{task}: gradbox's gradient is off by {ours.error:.0e}"
            + ("" if ours.updates_per_shard is None else ", and batch norm advances once a shard"),
        )


def _time_bars(task: str, settings: list[Setting]) -> Iterator[str]:
    most = max(settings, key=lambda s: s.kept[max(s.kept)].time)
    time = most.kept[max(most.kept)].time
    yield verdict(
        time <= ALLOWANCE,
        f"{task}: with everything kept at most {time:.3f} of the naive sharded step "
        f"({_place(most)}), allowed {ALLOWANCE}",
    )
    worst = max(settings, key=lambda s: s.kept[0].time / s.cost.bound)
    time, bound = worst.kept[0].time, worst.cost.bound
    yield verdict(
        time <= ALLOWANCE * bound,
        f"{task}: with nothing kept at most {time:.3f} ({_place(worst)}), allowed "
        f"{ALLOWANCE} × (2F + B)/(F + B) = {ALLOWANCE * bound:.3f}",
    )
    curved = max(settings, key=lambda s: s.off_line)
    yield verdict(
        curved.off_line <= LINEARITY,
        f"{task}: between, at most {curved.off_line:.1%} off the line ({_place(curved)}), allowed "
        f"{LINEARITY:.0%}",
    )
    lost = [line for setting in settings for line in _lost(setting)]
    yield verdict(
        not lost,
        f"{task}: at equal peak memory faster than every peer at every size"
        + (f", but not than {'; '.join(lost)}" if lost else ""),
    )


def _lost(setting: Setting) -> Iterator[str]:
    for name, kept in setting.equal.items():
        theirs = setting.peers[name]
        if kept is None:
            floor = setting.kept[0]
            yield (
                f"{name} ({_place(setting)}: it needs {mebibytes(theirs.peak_bytes)} MiB, gradbox "
                f"at least {mebibytes(floor.peak_bytes)}; {_time(theirs)} against "
                f"{_time(floor)})"
            )
        elif setting.kept[kept].time >= theirs.time:
            yield (
                f"{name} ({_place(setting)}: {_time(setting.kept[kept])} against {_time(theirs)})"
            )


def _setting(setting: Setting) -> Iterator[str]:
    workload, cost = setting.workload, setting.cost
    yield f"### {TITLES[workload.task]}: {_place(setting)}"
    yield ""
    yield (
        f"{workload.num_shards} shards, {setting.rounds} rounds. F {cost.forward * 1000:.1f} ms, B "
        f"{cost.backward * 1000:.1f} ms a shard: (2F + B)/(F + B) = {cost.bound:.3f}."
    )
    yield ""
    rows = [
        [
            f"gradbox, {kept} kept",
            _time(point),
            mebibytes(point.peak_bytes),
            f"predicted {setting.predicted(kept):.3f}",
            "",
        ]
        for kept, point in setting.kept.items()
    ]
    for name, point in setting.peers.items():
        row = [name, _time(point), mebibytes(point.peak_bytes)]
        rows.append(row + _ours(setting, name))
    yield from table(["", "time", "peak", "gradbox's time", "kept"], rows)


def _time(point: Point) -> str:
    return f"{point.time:.3f}" + (f" ± {point.error:.3f}" if point.error else "")


def _ours(setting: Setting, name: str) -> list[str]:
    if name == SHARDED.name:
        return ["", ""]
    kept = setting.equal[name]
    return ["needs more", ""] if kept is None else [f"{setting.kept[kept].time:.3f}", str(kept)]


def _place(setting: Setting) -> str:
    workload = setting.workload
    return f"N {2 * workload.num_pairs}, shard {workload.shard}"


def _flat_table(found: Retention) -> list[str]:
    sizes = found.plan.num_samples
    return table(
        ["", *(f"N {size}" for size in sizes)],
        [
            [f"{task}, shard {shard}", *(mebibytes(peaks[size]) for size in sizes)]
            for (task, shard), peaks in found.flat.items()
        ],
    )


def _correctness_table(found: Retention) -> list[str]:
    head = ["gradient's error; batch-norm updates a shard", *found.plan.tasks]
    rows = []
    for peer in (SHARDED, GRADBOX, *OTHERS):
        cells = [peer.name]
        for task in found.plan.tasks:
            seen = found.correctness[task].get(peer.name)
            if seen is None:
                cells.append(found.absent[f"{peer.name}, {task}"])
            else:
                updates = seen.updates_per_shard
                cells.append(f"{seen.error:.0e}" + ("" if updates is None else f"; {updates:.0f}"))
        rows.append(cells)
    return table(head, rows)
