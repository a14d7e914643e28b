"""What a job would take, measured on a few of its shards and extrapolated by counts.

The shards of `sampled` run as a job of their own, by the calls that the job itself would run by,
and a loss sees Z at its full size. They run twice: first as the job is, which warms up, then with
no graph kept. What the first run took more are graphs.

    memory    the peak of the second run, and what the job keeps of each further shard
    seconds   those of the second run, and of each further shard what one of its size took

On several devices it is the range with most to do that counts, and what they move between them is
left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch

from gradbox.protocol import (
    EstimateView,
    ForwardSpec,
    JacobianSpec,
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
from gradbox_engine.replay.retention import graph_budget
from gradbox_service.store.room import in_units
from gradbox_worker.computations import step
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
    FullSize,
    SampledGroup,
    SampledTensors,
    Stopwatch,
)
from gradbox_worker.files.result_in_memory import ResultPlace
from gradbox_worker.runs import HeldRun

GRAMS: Final = ("gram", "gram_trace")
# Sections of a result: what does not grow with the shards, and what a loss has at its full size.
OF_THE_MODEL: Final = ("grads", "buffers", "loss_buffers")
SEEN_BY_LOSS: Final = ("outputs/", "cotangents/", "dfdz/")

Place = Callable[[], ResultPlace]


@dataclass(frozen=True)
class Found:
    """What a job takes by itself, beside what was in memory before."""

    peak_bytes: int
    seconds: float
    result_bytes: int
    retained_bytes: int = 0  # of graphs that are kept beside the one that runs
    shards_retained: int | None = None
    graph_bytes: int = 0  # of the largest shard; 0 where none was kept


@dataclass(frozen=True)
class Ran:
    """A run of a few shards."""

    computed: Computed
    watch: Stopwatch
    peak_bytes: int
    rows_bytes: int  # in the file of dense rows


def measured(job: LoadedJob, computation: Compute, *, most_bytes: int, place: Place) -> Computed:
    """Return an estimate of a job, and nothing of what it computes.

    Args:
        computation: what the job's spec is computed by.
        most_bytes: what may be in the device's memory while the job runs.
        place: returns where dense rows go, which are thrown away.
    """
    spec, devices = job.work.spec, job.loaded.devices
    give_back_free_memory()
    shared: dict[str, Any] = {
        "before_bytes": used_bytes(*devices),
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
        found = _found(job, spec, computation, place)
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


def _found(job: LoadedJob, spec: Any, computation: Compute, place: Place) -> Found:
    """Run a few shards, and extrapolate."""
    others = getattr(spec, "against_group", None)
    named = {group.name: group for group in job.work.spec.inputs}
    groups = [SampledGroup.of(group, named[group.name], job.tensors) for group in job.groups]
    groups.sort(key=lambda sampled: sampled.name != others)  # as they run
    own = [sampled for sampled in groups if sampled.name != others]
    sizes = [size for sampled in own for size in sampled.sizes]
    parts = job.parts(*(sampled.name for sampled in own))
    of_parts = [sizes[part.start : part.stop] for part in parts]
    job.leading.alone()
    keeps_graphs, budget = isinstance(spec, SetLossSpec), None
    if keeps_graphs:
        budget = graph_budget(spec.retain, job.loaded.devices, sums_bytes=job.loaded.size_bytes)
        budget.has_room()  # measures what is free, as before the first shard
    alone = spec.model_copy(update={"retain": 0}) if hasattr(spec, "retain") else spec
    with SampledTensors(job.tensors, _by_sample(spec, groups)) as tensors:
        cut = replace(job, tensors=tensors, leading=ALONE, checkpointed=False)
        run = partial(_run, cut, computation=computation, groups=groups, place=place)
        first = run(spec if keeps_graphs else alone)
        first_bytes, num_kept = first.peak_bytes, first.computed.facts.get("shards_retained", 0)
        del first  # what it computed would count
        ran = run(alone)
        grown = _sizes(job, ran, groups)
        if getattr(spec, "form", "") == "auto" and not ran.rows_bytes:
            kept_bytes = sum(whole for name, (_, whole) in grown.items() if "factors/" in name)
            if kept_bytes > job.result_memory_bytes * ENGINE_SHARE:
                ran = run(spec.model_copy(update={"form": "dense"}))
                grown = _sizes(job, ran, groups)
        grown_bytes = _factors_bytes(spec, groups[0], run)
    seen = () if isinstance(spec, SampleSpec | ForwardSpec) else SEEN_BY_LOSS
    grown_bytes += sum(
        whole - taken for name, (taken, whole) in grown.items() if not name.startswith(seen)
    )
    rows_bytes = round(ran.rows_bytes * own[-1].share(own[-1].rows))
    if job.work.in_memory:
        grown_bytes += rows_bytes - ran.rows_bytes
    # The last shard's graph is kept in any case, and in both runs.
    counted = [size for sampled in own for size in sampled.run_sizes][: max(0, num_kept - 1)]
    graph_bytes = max(0, first_bytes - ran.peak_bytes) / max(1, sum(counted))  # by size
    kept = [
        size
        for size in of_parts[0][:-1]
        if budget and counted and budget.has_room() and budget.admit(round(graph_bytes * size))
    ]
    found = Found(
        peak_bytes=ran.peak_bytes + grown_bytes,
        seconds=_seconds(ran, spec, groups, of_parts=of_parts, kept=sum(kept)),
        result_bytes=rows_bytes + sum(whole for _, whole in grown.values()),
        retained_bytes=round(graph_bytes * sum(kept)),
        shards_retained=(len(kept) + 1) * len(parts) if keeps_graphs else None,
        graph_bytes=round(graph_bytes * max(sizes)),
    )
    return _with_update(job.run, spec, found) if job.run and isinstance(spec, StepSpec) else found


def _run(
    cut: LoadedJob,
    spec: Any,
    *,
    computation: Compute,
    groups: Sequence[SampledGroup],
    place: Place,
) -> Ran:
    give_back_free_memory()
    watch = Stopwatch(cut.observer, cut.loaded.devices)
    peak = PeakMemory(*cut.loaded.devices)
    with place() as rows:
        job = replace(
            cut,
            work=replace(cut.work, spec=spec),
            groups=[sampled.cut for sampled in groups],
            observer=watch,
            rows=rows,
            resized=FullSize(groups),
        )
        compute = step.gradient_alone if isinstance(spec, StepSpec) else computation
        computed = compute(job, spec)
        peak_bytes, _ = peak.measure()
        return Ran(computed, watch, peak_bytes, rows.rows_bytes)


def _sizes(job: LoadedJob, ran: Ran, groups: Sequence[SampledGroup]) -> dict[str, tuple[int, int]]:
    """Return what each tensor takes in the result file, of the run shards and of all."""
    named, own = {sampled.name: sampled for sampled in groups}, groups[-1]
    found = {}
    for name, tensor in ran.computed.tensors.items():
        section, _, rest = name.partition("/")
        sampled, times = named.get(rest.partition("/")[0], own), 1.0
        if section in ("factors", "input_grads"):
            times = sampled.share(sampled.sizes)
        elif rest.startswith("gram") and section == "samples":
            times = own.share(own.rows) * groups[0].share(groups[0].rows)
        elif section not in OF_THE_MODEL and tensor.dim():
            times = sampled.num_rows(len(tensor)) / max(1, len(tensor))
        taken = tensor.numel() * job.rounding.stored_dtype(name, tensor.dtype).itemsize
        found[name] = (taken, round(taken * times))
    return found


def _seconds(
    ran: Ran,
    spec: JobSpec,
    groups: Sequence[SampledGroup],
    *,
    of_parts: Sequence[Sequence[int]],
    kept: int,
) -> float:
    """Return what all shards take: those that did not run by their sizes.

    Args:
        of_parts: the sizes of each device's shards.
        kept: of the shards whose graphs are kept, which have no second forward pass.
    """
    loads = [sum(part) for part in of_parts]
    longest = max(loads) / max(1, sum(loads))
    forward, replay, samples = (
        ran.watch.seconds(phase) for phase in ("forward", "replay", "samples")
    )
    if not isinstance(spec, MixedGradientSpec):
        replay = replay[1:]  # the last shard comes first there, whose graph was kept
    seconds = sum(ran.computed.seconds.values())
    for phase_s in (forward, replay, samples):
        of_run, of_all = _extrapolated(groups, phase_s)
        seconds += of_all * longest - of_run
    if replay:
        seconds -= _extrapolated(groups, forward)[1] * kept / max(1, sum(loads))
    if getattr(spec, "reduce", None) in GRAMS and len(samples) > 1:
        product_s = max(0.0, samples[-1] - samples[0])  # which follows the last shard
        seconds += product_s * (groups[-1].share(groups[-1].rows) ** 2 - 1)
    return max(0.0, seconds)


def _extrapolated(groups: Sequence[SampledGroup], shards_s: Sequence[float]) -> tuple[float, float]:
    """Return what the run shards and all shards take at the pace of each group's largest.

    Args:
        shards_s: of the run ones, in order.
    """
    of_run, of_all, left = 0.0, 0.0, list(shards_s)
    for sampled in groups:
        taken, left = left[: len(sampled.places)], left[len(sampled.places) :]
        pace_s = min(taken[0], taken[-1]) / max(1, *sampled.sizes) if taken else 0.0
        of_run += pace_s * sum(sampled.run_sizes)
        of_all += pace_s * sum(sampled.sizes)
    return of_run, of_all


def _by_sample(spec: JobSpec, groups: Sequence[SampledGroup]) -> Mapping[TensorRef, SampledGroup]:
    """Return whose samples a tensor that the spec names may have rows for."""
    if isinstance(spec, JacobianSpec):
        return {spec.vectors: groups[-1]} if isinstance(spec.vectors, TensorRef) else {}
    if not isinstance(spec, PerSampleGradientSpec):
        return {}
    own = {ref: groups[-1] for ref in spec.loss_inputs.values() if isinstance(ref, TensorRef)}
    return own | dict.fromkeys(spec.against_loss_inputs.values(), groups[0])


def _factors_bytes(spec: Any, kept: SampledGroup, run: Callable[..., Ran]) -> int:
    """Return what a product keeps of all samples' factors beyond those of the run ones.

    Args:
        kept: the group whose factors are kept: the other one, where there is one.
    """
    multiplies = getattr(spec, "reduce", "") in GRAMS or getattr(spec, "against_group", None)
    if not multiplies or spec.against is not None:  # an earlier job's are counted as they are
        return 0
    update: dict[str, Any] = {
        "inputs": [group for group in spec.inputs if group.name == kept.name],
        "reduce": "none", "form": "factored", "against_group": None, "clip": None, "dim": None,
        "vectors": None, "kind": "sketch",
    }  # fmt: skip
    if isinstance(spec, PerSampleGradientSpec):
        update["loss_inputs"] = {**spec.loss_inputs, **spec.against_loss_inputs}
        update["against_loss_inputs"] = {}
    tensors = run(spec.model_copy(update=update), groups=[kept]).computed.tensors
    taken = sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith("factors/"))
    return round(taken * (kept.share(kept.sizes) - 1))


def _with_update(run: HeldRun, spec: StepSpec, found: Found) -> Found:
    """Add a step's update, as it is made of the largest parameter and a copy of its moments."""
    weights = run.state.masters
    name = max(weights, key=lambda name: weights[name].numel())
    trial, grads = run.state.alike({name: weights[name]}), {name: torch.zeros_like(weights[name])}
    began_s = time.perf_counter()
    trial.step(grads, lr=0.0 if spec.lr is not None else None)
    seconds = time.perf_counter() - began_s
    all_bytes = sum(weight.nbytes for weight in weights.values())
    share = all_bytes / max(1, weights[name].nbytes)
    moments_bytes = round(share * (trial.num_bytes - weights[name].nbytes))
    is_new = run.state.num_bytes < all_bytes + moments_bytes
    return replace(
        found,
        seconds=found.seconds + share * seconds,
        peak_bytes=found.peak_bytes + (moments_bytes if is_new else 0),
    )
