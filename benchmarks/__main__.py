"""`python -m benchmarks`: run the benchmarks and write a dated report."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from typing import Final

from benchmarks.measure import QUIET
from benchmarks.options import SHORT, options
from benchmarks.report import write_report
from benchmarks.source_trees import ROOT


def main(arguments: list[str]) -> int:
    """Run what is asked for; 0 when it ran, whatever the bars say."""
    args = options(list(ALL)).parse_args(arguments)
    os.environ.update(QUIET)
    # A box builds models that are defined here, in processes of its own.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    if args.benchmarks == ["cuda"]:
        return _cuda(args)
    names = list(ALL) if args.benchmarks == ["all"] else args.benchmarks or [*SHORT]
    sections = [ALL[name](args) for name in names]
    path = write_report(
        args.report or "-".join(args.benchmarks or ["short"]), sections, folder=args.out
    )
    print(path.read_text())
    print(f"written to {path}")
    return 0


def _cuda(args: argparse.Namespace) -> int:
    """Run the benchmarks of a GPU; 0 if all its parts ran."""
    from benchmarks.cuda.parts import measure_cuda

    sections, well = measure_cuda(args.parts, device=args.device or "cuda", dry=args.dry)
    if args.section is not None:
        args.section.write_text("\n\n".join(sections) + "\n")
    else:
        path = write_report(args.report or "cuda", sections, folder=args.out)
        print(path.read_text())
    return 0 if well else 1


def _replay(args: argparse.Namespace) -> str:
    from benchmarks.replay.replay import Plan, measure_replay
    from benchmarks.replay.replay_report import replay_section

    plan = Plan(
        timed_pairs=args.timed_pairs,
        memory_pairs=args.pairs,
        naive_limit=args.naive_limit,
        shard=args.shard,
        rounds=args.rounds,
        threads=args.threads,
    )
    return replay_section(measure_replay(plan))


def _batch_sizes(args: argparse.Namespace) -> str:
    from benchmarks.replay.batch_plot import plot_batches
    from benchmarks.replay.batch_sizes import BatchPlan, batch_section, measure_batches

    plan = BatchPlan(args.pairs, shard=args.shard, rounds=args.rounds, threads=args.threads)
    found = measure_batches(plan)
    if args.plot is not None:
        plot_batches(found, args.plot)
    return batch_section(found)


def _retention(args: argparse.Namespace) -> str:
    if args.ends:
        from benchmarks.replay.ends import ends_section, measure_ends

        return ends_section(measure_ends(args.tasks, against=args.against))
    from benchmarks.replay.retention import RetentionPlan, measure_retention
    from benchmarks.replay.retention_plot import plot_retention
    from benchmarks.replay.retention_report import retention_section

    plan = RetentionPlan(
        tasks=args.tasks,
        num_samples=args.samples,
        shards=args.shards,
        timed=args.timed_samples,
        detailed=args.detailed_samples,
        num_tokens=args.num_tokens,
        rounds=args.retention_rounds,
        seconds=args.retention_seconds,
        threads=args.threads,
        device=args.device or "cpu",
    )
    found = measure_retention(plan)
    if args.plot is not None:
        plot_retention(found, args.plot)
    return retention_section(found)


def _penalties(_: argparse.Namespace) -> str:
    from benchmarks.replay.penalties import measure_penalties, penalty_section

    return penalty_section(measure_penalties())


def _packing(args: argparse.Namespace) -> str:
    from benchmarks.replay.packing import PackingPlan, measure_packing, packing_section

    plan = PackingPlan(args.packed_pairs, args.packed_tokens, args.rounds, args.threads)
    return packing_section(measure_packing(plan))


def _service(args: argparse.Namespace) -> str:
    from benchmarks.box.service import ServicePlan, measure_service, service_section

    plan = ServicePlan(args.service_pairs, args.shard, args.rounds, args.threads)
    return service_section(measure_service(plan))


def _small_jobs(_: argparse.Namespace) -> str:
    from benchmarks.box.small_jobs import measure_small_jobs, small_jobs_section

    return small_jobs_section(measure_small_jobs())


def _local(_: argparse.Namespace) -> str:
    from benchmarks.box.local import local_section, measure_local

    return local_section(measure_local())


def _large_results(_: argparse.Namespace) -> str:
    from benchmarks.box.large_results import large_results_section, measure_large_results

    return large_results_section(measure_large_results())


def _small_calls(args: argparse.Namespace) -> str:
    from benchmarks.replay.small_calls import measure_small_calls, small_calls_section

    return small_calls_section(measure_small_calls(against=args.against))


def _training_steps(args: argparse.Namespace) -> str:
    from benchmarks.box.training_step import measure_training_steps, training_steps_section

    return training_steps_section(measure_training_steps())


def _training_runs(args: argparse.Namespace) -> str:
    from benchmarks.box.training_runs import (
        RunsPlan,
        measure_training_runs,
        training_runs_section,
    )

    plan = RunsPlan(args.training_pairs, args.shard, args.rounds)
    return training_runs_section(measure_training_runs(plan))


def _queue(args: argparse.Namespace) -> str:
    from benchmarks.box.queue import measure_queue, queue_section

    return queue_section(measure_queue(args.queued))


def _day(args: argparse.Namespace) -> str:
    from benchmarks.box.day import day_section, measure_day

    return day_section(measure_day(seconds=args.day_seconds))


def _mixed(args: argparse.Namespace) -> str:
    from benchmarks.mixed.times import MixedPlan, measure_mixed, mixed_section

    plan = MixedPlan(
        num_shards=args.mixed_shards,
        depths=args.depths,
        depth=args.depth,
        shard=args.mixed_shard,
        rounds=args.rounds,
        threads=args.threads,
    )
    return mixed_section(measure_mixed(plan))


def _cluster(args: argparse.Namespace) -> str:
    from benchmarks.cluster.speed_up import ClusterPlan, cluster_section, measure_cluster

    plan = ClusterPlan(args.cluster_pairs, 8, args.rounds, num_samples=args.cluster_samples)
    return cluster_section(measure_cluster(plan))


def _scale(args: argparse.Namespace) -> str:
    from benchmarks.cluster.scale_report import ScalePlan, measure_scale, plot_scale, scale_section

    found = measure_scale(ScalePlan(pairs=args.scale_pairs))
    if args.plot is not None:
        plot_scale(found, args.plot)
    return scale_section(found)


def _autograd(args: argparse.Namespace) -> str:
    from benchmarks.box.remote_autograd import (
        AutogradPlan,
        autograd_section,
        measure_remote_autograd,
    )

    plan = AutogradPlan(args.autograd_pairs, args.shard, args.rounds, args.threads)
    return autograd_section(measure_remote_autograd(plan))


def _per_sample(args: argparse.Namespace) -> str:
    from benchmarks.per_sample.calls import calls_section, measure_calls

    if args.calls:
        return calls_section(measure_calls(list(args.workloads), against=args.against))
    from benchmarks.per_sample.jobs import jobs_section, measure_jobs
    from benchmarks.per_sample.report import per_sample_section
    from benchmarks.per_sample.times import measure_per_sample

    calls = per_sample_section(measure_per_sample(list(args.workloads)))
    return calls + "\n\n" + jobs_section(measure_jobs(list(args.workloads)))


def _estimates(_: argparse.Namespace) -> str:
    from benchmarks.box.estimates import estimates_section, measure_estimates

    return estimates_section(measure_estimates())


def _attribution(args: argparse.Namespace) -> str:
    from benchmarks.attribution.report import attribution_section, measure_attribution

    return attribution_section(measure_attribution(num_subsets=args.subsets))


ALL: Final[Mapping[str, Callable[[argparse.Namespace], str]]] = {
    "replay": _replay,
    "batch-sizes": _batch_sizes,
    "retention": _retention,
    "penalties": _penalties,
    "packing": _packing,
    "small-calls": _small_calls,
    "service": _service,
    "small-jobs": _small_jobs,
    "local": _local,
    "training-steps": _training_steps,
    "training-runs": _training_runs,
    "large-results": _large_results,
    "estimates": _estimates,
    "queue": _queue,
    "day": _day,
    "mixed": _mixed,
    "autograd": _autograd,
    "cluster": _cluster,
    "scale": _scale,
    "per-sample": _per_sample,
    "attribution": _attribution,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
