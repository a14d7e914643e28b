"""What a job would take, measured on a few of its shards and extrapolated by counts.

    in two phases    the shards of `sampled` run with the loss at its full size and no graph kept;
                     further graphs are added as the budget of `retain` would admit them
    rows             those shards as a job of their own; what is kept of each sample is added

    seconds = Σᵢ Fᵢ + the loss + Σ_{kept} Bᵢ + Σ_{others} (F + B)ᵢ,    F, B linear in a shard's size

It runs by the calls that the job itself would run by, twice: the first time warms up. On several
devices it is the range with most to do that counts, and what they move between them is left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from gradbox.protocol import (
    EstimateView,
    ForwardSpec,
    JobSpec,
    MixedGradientSpec,
    PerSampleGradientSpec,
    SampleSpec,
    SetLossSpec,
    StepSpec,
    TensorRef,
    names_in,
)
from gradbox.protocol.spec_fields import DIGEST
from gradbox_engine.model.calling.shard_feed import Position, all_positions
from gradbox_engine.ranges import Range
from gradbox_engine.replay.retention import GraphBudget
from gradbox_service.store import Room
from gradbox_service.store.room import in_units
from gradbox_worker.computations import step
from gradbox_worker.computations.checkpoints import JobCheckpoints, Pace
from gradbox_worker.computations.identity import device_name
from gradbox_worker.computations.job import Compute, Computed, LoadedJob
from gradbox_worker.computations.leading import ALONE
from gradbox_worker.computations.memory import (
    PeakMemory,
    give_back_free_memory,
    used_bytes,
)
from gradbox_worker.computations.per_sample import ENGINE_SHARE
from gradbox_worker.computations.placement import memory_bytes
from gradbox_worker.computations.sampled import (
    CountedRows,
    SampledGroup,
    SampledLeading,
    SampledTensors,
    Stopwatch,
)
from gradbox_worker.files.result_in_memory import ResultInMemory
from gradbox_worker.files.result_in_place import ResultOnDisk
from gradbox_worker.runs import HeldRun

# A first run that took so long is not repeated.
LONG_S: Final = 10.0
GRAMS: Final = ("gram", "gram_trace")


@dataclass(frozen=True)
class Found:
    """What a job takes by itself, beside what was in memory before."""

    peak_bytes: int
    seconds: float
    result_bytes: int
    retained_bytes: int = 0  # of graphs that are kept beside the one that runs
    shards_retained: int | None = None
    graph_bytes: int = 0  # of the largest shard


def measured(job: LoadedJob, computation: Compute, *, most_bytes: int) -> Computed:
    """Return an estimate of a job, and nothing of what it computes.

    Args:
        computation: what the job's spec is computed by.
        most_bytes: what may be in the device's memory while the job runs.
    """
    spec, devices = job.work.spec, job.loaded.devices
    give_back_free_memory()
    before_bytes = used_bytes(*devices)
    shared: dict[str, Any] = {
        "before_bytes": before_bytes,
        "most_bytes": most_bytes,
        "device": device_name(*devices),
        "device_bytes": memory_bytes(*devices),
        "upload_bytes": sum(
            job.tensors.num_bytes(name) for name in set(names_in(spec)) if DIGEST.fullmatch(name)
        ),
    }
    if job.work.ran_out_bytes is not None:
        peak_bytes = max(job.work.ran_out_bytes, most_bytes)
        view = EstimateView(
            fits=False,
            peak_bytes=peak_bytes,
            peak_retained_bytes=peak_bytes,
            advice=_advice(spec, None),
            **shared,
        )
        return Computed(tensors={}, facts={"estimate": view}, seconds={})
    with torch.inference_mode(False):
        found = (
            _rows(job, spec, computation)
            if isinstance(spec, SampleSpec)
            else _phases(job, spec, computation)
        )
    give_back_free_memory()
    fits = found.peak_bytes <= most_bytes
    view = EstimateView(
        fits=fits,
        peak_bytes=found.peak_bytes,
        peak_retained_bytes=found.peak_bytes + found.retained_bytes,
        seconds=found.seconds,
        shards_retained=found.shards_retained,
        result_bytes=found.result_bytes,
        advice="" if fits else _advice(spec, found),
        **shared,
    )
    return Computed(tensors={}, facts={"estimate": view}, seconds={})


def _advice(spec: JobSpec, found: Found | None) -> str:
    """Return what makes a job smaller, what helps most first."""
    ways = ["cut the inputs into smaller shards"]
    if isinstance(spec, SampleSpec):
        if spec.reduce == "none" and spec.form != "dense":
            ways.insert(0, "take form='dense', whose rows go to the disk as they are made")
        elif spec.reduce in GRAMS:
            ways.append("cut the samples into several jobs, with against= for the blocks between")
    elif isinstance(spec, SetLossSpec):
        returns: Sequence[str] = getattr(spec, "returns", ())
        kept = [name for name in ("outputs", "cotangents", "input_grads") if name in returns]
        if kept:
            ways.append(f"leave {', '.join(kept)} out of returns")
    if getattr(spec, "recompute", None) == "off":
        ways.append("leave recompute out, which then cuts a shard's graph at the model's blocks")
    if not isinstance(spec, MixedGradientSpec):
        ways.append("ask for fewer gradients by wrt")
    if spec.precision in ("fp32", "tf32", "fp64"):
        ways.append("compute in precision='bf16'" if spec.precision != "fp64" else "leave fp64")
    graph = (
        f" (the largest shard's graph takes {in_units(found.graph_bytes)})"
        if (found is not None and found.graph_bytes)
        else ""
    )
    return f"{ways[0]}{graph}, or {', or '.join(ways[1:])}"


def _repeated(
    job: LoadedJob, run: Callable[[Stopwatch], Computed]
) -> tuple[Computed, Stopwatch, float, int]:
    """Run twice; return what the second run gave, its times, seconds, and the memory's peak."""
    for _ in range(2):
        watch = Stopwatch(job.observer, job.loaded.devices)
        peak, began_s = PeakMemory(*job.loaded.devices), time.perf_counter()
        computed = run(watch)
        seconds, (peak_bytes, _) = time.perf_counter() - began_s, peak.measure()
        if seconds > LONG_S:
            break
    return computed, watch, seconds, peak_bytes


def _result_bytes(job: LoadedJob, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return what each tensor takes in the result file."""
    stored = job.rounding.stored_dtype
    return {name: x.numel() * stored(name, x.dtype).itemsize for name, x in tensors.items()}


def _linear(points: Mapping[int, float]) -> Callable[[int], float]:
    """Return seconds by a shard's size, through those of one size or two."""
    (low, low_s), (high, high_s) = min(points.items()), max(points.items())
    slope = max(0.0, (high_s - low_s) / (high - low)) if high > low else 0.0
    return lambda size: high_s + slope * (size - high)


# --- jobs in two phases ---


def _phases(job: LoadedJob, spec: JobSpec, computation: Compute) -> Found:
    groups = _sampled(job)
    parts = job.parts()
    job.leading.alone()
    retain = getattr(spec, "retain", 0)
    leading = SampledLeading(groups, retain)
    compute: Compute = step.gradient_alone if isinstance(spec, StepSpec) else computation
    plain = spec if isinstance(spec, MixedGradientSpec) else spec.model_copy(update={"retain": 0})
    cut = replace(
        job,
        work=replace(job.work, spec=plain),
        leading=leading,
        held_groups=[sampled.cut for sampled in groups],
        checkpointed=False,
    )
    computed, watch, _, peak_bytes = _repeated(
        job, lambda watch: compute(replace(cut, observer=watch), plain)
    )
    made = leading.graphs
    assert made is not None
    shards = ShardSeconds.of(groups, watch, in_order=isinstance(spec, MixedGradientSpec))
    positions = all_positions([sampled.group for sampled in groups])
    of_parts = [positions[part.start : part.stop] for part in parts]
    graphs = [_graph_bytes(groups, made.saved_bytes, at) for at in of_parts[0]]
    last_is_kept = made.budget is not None and not isinstance(spec, ForwardSpec)
    kept = _kept(graphs[:-1] if last_is_kept else graphs, made.budget)
    total = partial(shards.total, kept=kept, last_is_kept=last_is_kept, kept_s=made.forward_s)
    num_kept = (len(kept) + last_is_kept) * len(parts)
    found = Found(
        peak_bytes=peak_bytes,
        seconds=max(map(total, of_parts)) + computed.seconds.get("cotangents", 0.0),
        result_bytes=sum(_result_bytes(job, computed.tensors).values()),
        retained_bytes=round(made.in_memory * sum(graphs[place] for place in kept)),
        shards_retained=None if made.budget is None else num_kept,
        graph_bytes=max(made.saved_bytes.values(), default=0),
    )
    if isinstance(spec, StepSpec) and job.run is not None:
        return _with_update(job.run, spec, computed, found)
    return found


def _graph_bytes(
    groups: Sequence[SampledGroup], largest: Mapping[int, int], position: Position
) -> int:
    """Return what a shard's graph saves, by that of its group's largest shard."""
    sizes = groups[position.group].sizes
    return round(largest.get(position.group, 0) * sizes[position.shard] / max(1, *sizes))


def _kept(graphs: Sequence[int], budget: GraphBudget | None) -> set[int]:
    """Return which shards' graphs the budget admits."""
    if budget is None:
        return set()
    return {n for n, size in enumerate(graphs) if budget.has_room() and budget.admit(size)}


@dataclass(frozen=True)
class ShardSeconds:
    """What a shard's first pass and its replay take by its size, for each group."""

    groups: Sequence[SampledGroup]
    forward: Sequence[Callable[[int], float]]
    replay: Sequence[Callable[[int], float]]

    @classmethod
    def of(
        cls, groups: Sequence[SampledGroup], watch: Stopwatch, *, in_order: bool
    ) -> ShardSeconds:
        """Read the times of a run, in which the last shard's graph was kept and used first.

        Args:
            in_order: whether no graph was kept, and shards were replayed in order.
        """
        run = all_positions([sampled.cut for sampled in groups])
        sizes = [groups[at.group].sizes[groups[at.group].places[at.shard]] for at in run]
        first, second = watch.seconds("forward"), watch.seconds("replay")
        forward = _fastest(run, sizes, first)
        if second and not in_order:
            second = [*second[1:], second[0] + (first[-1] if first else 0.0)]
        replay = _fastest(run, sizes, second)
        count = range(len(groups))
        return cls(
            groups,
            [_linear(forward.get(group) or {0: 0.0}) for group in count],
            [_linear(replay.get(group) or {0: 0.0}) for group in count],
        )

    def total(
        self,
        positions: Sequence[Position],
        *,
        kept: Set[int],
        last_is_kept: bool,
        kept_s: Mapping[int, float],
    ) -> float:
        """Return what shards take one after the other, some of whose graphs are kept.

        Args:
            kept_s: what the first pass of a group's largest shard takes where its graph is kept.
        """
        seconds = 0.0
        for place, at in enumerate(positions):
            sizes = self.groups[at.group].sizes
            size = sizes[at.shard]
            once, again = self.forward[at.group](size), self.replay[at.group](size)
            back = max(0.0, again - once)
            if place in kept:
                slower_s = max(0.0, kept_s.get(at.group, 0.0) - self.forward[at.group](max(sizes)))
                seconds += once + slower_s * size / max(1, *sizes) + back
            else:
                is_last = last_is_kept and place == len(positions) - 1
                seconds += once + (back if is_last else again)
        return seconds


def _fastest(
    positions: Sequence[Position], sizes: Sequence[int], seconds: Sequence[float]
) -> dict[int, dict[int, float]]:
    """Return the seconds by group and size, of shards of one size those of the fastest."""
    found: dict[int, dict[int, float]] = {}
    for at, size, taken in zip(positions, sizes, seconds, strict=False):
        of_group = found.setdefault(at.group, {})
        of_group[size] = min(taken, of_group.get(size, math.inf))
    return found


def _with_update(run: HeldRun, spec: StepSpec, computed: Computed, found: Found) -> Found:
    """Add a step's update, as it is made of the largest parameter and a copy of its moments."""
    weights = run.state.masters
    name = max(weights, key=lambda name: weights[name].numel())
    trial, grads = run.state.alike({name: weights[name]}), {name: torch.zeros_like(weights[name])}
    seconds = math.inf
    for _ in range(2):
        began_s = time.perf_counter()
        trial.step(grads, lr=0.0 if spec.lr is not None else None)
        seconds = min(seconds, time.perf_counter() - began_s)
    all_bytes = sum(weight.nbytes for weight in weights.values())
    share = all_bytes / max(1, weights[name].nbytes)
    moments_bytes = round(share * (trial.num_bytes - weights[name].nbytes))
    is_new = run.state.num_bytes < all_bytes + moments_bytes
    return replace(
        found,
        seconds=found.seconds + share * seconds,
        peak_bytes=found.peak_bytes + (moments_bytes if is_new else 0),
    )


# --- rows ---


def _rows(job: LoadedJob, spec: Any, computation: Compute) -> Found:
    groups = _sampled(job)
    own_parts = job.parts(*(g.group.name for g in groups if g.group.name != spec.against_group))
    job.leading.alone()
    own = next(g for g in groups if g.group.name != spec.against_group)
    others = next((g for g in groups if g is not own), None)
    path = job.work.result_path.with_suffix(".estimate")
    on_disk = partial(ResultOnDisk, path, room=Room(path.parent, job.work.disk_reserve_bytes))
    rows = CountedRows()
    with SampledTensors(job.tensors, _by_sample(spec, own, others)) as tensors:
        cut = _cut(job, [sampled.cut for sampled in groups], tensors, rows)

        def run(watch: Stopwatch, spec: Any) -> Computed:
            with ResultInMemory() if job.work.in_memory else on_disk() as rows.file:
                return computation(replace(cut, observer=watch), spec)

        computed, watch, seconds, peak_bytes = _repeated(job, lambda watch: run(watch, spec))
        sizes = _extrapolated(job, computed, own, others)
        if spec.form == "auto" and not rows.num_bytes:
            kept_bytes = sum(whole for name, (_, whole) in sizes.items() if "factors/" in name)
            if kept_bytes > job.result_memory_bytes * ENGINE_SHARE:
                spec = spec.model_copy(update={"form": "dense"})
                computed, watch, seconds, peak_bytes = _repeated(job, lambda w: run(w, spec))
                sizes = _extrapolated(job, computed, own, others)
        grown_bytes = sum(whole - taken for taken, whole in sizes.values())
        if spec.against is None and (spec.reduce in GRAMS or others is not None):
            kept = others or own
            alone = _factors_of(spec, kept)
            cut = replace(cut, groups=[kept.cut])
            factors = run(Stopwatch(job.observer, ()), alone).tensors
            taken = sum(x.nbytes for name, x in factors.items() if name.startswith("factors/"))
            grown_bytes += round(taken * (kept.share(kept.sizes) - 1))
    share = own.share(own.rows)
    if job.work.in_memory:
        grown_bytes += round(rows.num_bytes * (share - 1))
    return Found(
        peak_bytes=peak_bytes + grown_bytes,
        seconds=_row_seconds(spec, own, others, watch.seconds("samples"), seconds, own_parts),
        result_bytes=round(rows.num_bytes * share) + sum(whole for _, whole in sizes.values()),
    )


def _row_seconds(
    spec: Any,
    own: SampledGroup,
    others: SampledGroup | None,
    shards_s: Sequence[float],
    seconds: float,
    parts: Sequence[Range],
) -> float:
    """Return what all rows take: the first shard has its checks, the last what follows all."""
    sizes = [own.sizes[place] for place in own.places]
    if others is not None or len(shards_s) != len(sizes):
        return seconds * own.share(own.sizes)
    at = _linear(_fastest([Position(0, 0)] * len(sizes), sizes, shards_s)[0])
    setup_s = seconds - sum(shards_s)
    checks_s = max(0.0, shards_s[0] - at(sizes[0]))
    after_s = max(0.0, shards_s[-1] - at(sizes[-1])) if len(sizes) > 1 else 0.0
    share = own.share(own.rows)
    after_s *= share**2 if spec.reduce in GRAMS else share
    longest_s = max(sum(map(at, own.sizes[part.start : part.stop])) for part in parts)
    return setup_s + checks_s + longest_s + after_s


def _by_sample(
    spec: Any, own: SampledGroup, others: SampledGroup | None
) -> dict[TensorRef, SampledGroup]:
    """Return whose samples a tensor that the spec names may have rows for."""
    taken: dict[TensorRef, SampledGroup] = {}
    if isinstance(spec, PerSampleGradientSpec):
        taken |= {ref: own for ref in spec.loss_inputs.values() if isinstance(ref, TensorRef)}
        if others is not None:
            taken |= dict.fromkeys(spec.against_loss_inputs.values(), others)
    elif isinstance(spec.vectors, TensorRef):
        taken[spec.vectors] = own
    return taken


def _cut(job: LoadedJob, groups: list[Any], tensors: SampledTensors, rows: Any) -> LoadedJob:
    """Return a job of a few shards alone, without checkpoints."""
    never = Pace(first_s=math.inf)
    checkpoints = JobCheckpoints(
        replace(job.work, job_id=f"{job.work.job_id}.estimate"),
        identity=dict,
        rows=rows,
        rounding=job.rounding,
        pace=never,
    )
    return replace(
        job, groups=groups, tensors=tensors, rows=rows, leading=ALONE, checkpoints=checkpoints
    )


def _extrapolated(
    job: LoadedJob, computed: Computed, own: SampledGroup, others: SampledGroup | None
) -> dict[str, tuple[int, int]]:
    """Return what each tensor in memory takes of the run shards, and what it takes of all."""
    share = own.share(own.rows)
    across = share if others is None else others.share(others.rows)
    by_size = own.share(own.sizes)
    found = {}
    for name, taken in _result_bytes(job, computed.tensors).items():
        if name.startswith("samples/gram"):
            times = share * across
        elif name.startswith("factors/"):
            times = by_size
        elif others is not None and name == f"outputs/{others.group.name}":
            times = across
        else:
            times = 1.0 if name.startswith("grads/") else share
        found[name] = (taken, round(taken * times))
    return found


def _factors_of(spec: Any, kept: SampledGroup) -> Any:
    """Return the job of one group's factors alone, which a product keeps of all its samples."""
    update: dict[str, Any] = {
        "inputs": [group for group in spec.inputs if group.name == kept.group.name],
        "reduce": "none", "form": "factored", "against_group": None, "clip": None, "dim": None,
        "vectors": None, "kind": "sketch",
    }  # fmt: skip
    if isinstance(spec, PerSampleGradientSpec):
        update["loss_inputs"] = {**spec.loss_inputs, **spec.against_loss_inputs}
        update["against_loss_inputs"] = {}
    known = type(spec).model_fields
    return spec.model_copy(update={name: value for name, value in update.items() if name in known})


def _sampled(job: LoadedJob) -> list[SampledGroup]:
    named = {group.name: group for group in job.work.spec.inputs}
    return [SampledGroup.of(group, named[group.name], job.tensors) for group in job.groups]
