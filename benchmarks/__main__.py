"""`python -m benchmarks`: run the benchmarks and write a dated report."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from benchmarks.measure import QUIET
from benchmarks.per_sample_workloads import WORKLOADS as PER_SAMPLE
from benchmarks.report import REPORTS, replay_section, service_section, write_report
from benchmarks.workloads import ENCODERS

CUDA_PARTS = ("engine", "per-sample", "upload", "decoder", "mixed", "graphs", "service")


def main(arguments: list[str]) -> int:
    """Run what is asked for; 0 when it ran, whatever the bars say."""
    args = _parser().parse_args(arguments)
    os.environ.update(QUIET)
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
    from benchmarks.replay import Plan, measure_replay

    plan = Plan(
        timed_pairs=args.timed_pairs,
        memory_pairs=args.pairs,
        naive_limit=args.naive_limit,
        shard=args.shard,
        rounds=args.rounds,
        threads=args.threads,
    )
    return replay_section(measure_replay(plan))


def _retention(args: argparse.Namespace) -> str:
    if args.ends:
        from benchmarks.replay_ends import ends_section, measure_ends

        return ends_section(measure_ends(args.tasks, against=args.against))
    from benchmarks.plot import plot_retention
    from benchmarks.retention import RetentionPlan, measure_retention
    from benchmarks.retention_report import retention_section

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
    from benchmarks.penalty_memory import measure_penalties, penalty_section

    return penalty_section(measure_penalties())


def _packing(args: argparse.Namespace) -> str:
    from benchmarks.packing import PackingPlan, measure_packing, packing_section

    plan = PackingPlan(args.packed_pairs, args.packed_tokens, args.rounds, args.threads)
    return packing_section(measure_packing(plan))


def _overhead(_: argparse.Namespace) -> str:
    from benchmarks.overhead import measure_overhead, overhead_section

    return overhead_section(measure_overhead())


def _service(args: argparse.Namespace) -> str:
    from benchmarks.service import ServicePlan, measure_service

    plan = ServicePlan(args.service_pairs, args.shard, args.rounds, args.threads)
    return service_section(measure_service(plan))


def _small_jobs(_: argparse.Namespace) -> str:
    from benchmarks.small_jobs import measure_small_jobs, small_jobs_section

    return small_jobs_section(measure_small_jobs())


def _large_results(_: argparse.Namespace) -> str:
    from benchmarks.large_results import large_results_section, measure_large_results

    return large_results_section(measure_large_results())


def _queue(args: argparse.Namespace) -> str:
    from benchmarks.queue import measure_queue, queue_section

    return queue_section(measure_queue(args.queued))


def _day(args: argparse.Namespace) -> str:
    from benchmarks.day import day_section, measure_day

    return day_section(measure_day(seconds=args.day_seconds))


def _mixed(args: argparse.Namespace) -> str:
    from benchmarks.mixed import MixedPlan, measure_mixed, mixed_section

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
    from benchmarks.cluster import ClusterPlan, cluster_section, measure_cluster

    plan = ClusterPlan(args.cluster_pairs, 8, args.rounds, num_samples=args.cluster_samples)
    return cluster_section(measure_cluster(plan))


def _scale(args: argparse.Namespace) -> str:
    from benchmarks.scale_report import ScalePlan, measure_scale, plot_scale, scale_section

    found = measure_scale(ScalePlan(pairs=args.scale_pairs))
    if args.plot is not None:
        plot_scale(found, args.plot)
    return scale_section(found)


def _autograd(args: argparse.Namespace) -> str:
    from benchmarks.remote_autograd import AutogradPlan, autograd_section, measure_remote_autograd

    plan = AutogradPlan(args.autograd_pairs, args.shard, args.rounds, args.threads)
    return autograd_section(measure_remote_autograd(plan))


def _per_sample(args: argparse.Namespace) -> str:
    from benchmarks.per_sample_calls import calls_section, measure_calls

    if args.calls:
        return calls_section(measure_calls(list(args.workloads), against=args.against))
    from benchmarks.per_sample import measure_per_sample
    from benchmarks.per_sample_jobs import jobs_section, measure_jobs
    from benchmarks.per_sample_report import per_sample_section

    calls = per_sample_section(measure_per_sample(list(args.workloads)))
    return calls + "\n\n" + jobs_section(measure_jobs(list(args.workloads)))


ALL: Final[Mapping[str, Callable[[argparse.Namespace], str]]] = {
    "replay": _replay,
    "retention": _retention,
    "penalties": _penalties,
    "packing": _packing,
    "overhead": _overhead,
    "service": _service,
    "small-jobs": _small_jobs,
    "large-results": _large_results,
    "queue": _queue,
    "day": _day,
    "mixed": _mixed,
    "autograd": _autograd,
    "cluster": _cluster,
    "scale": _scale,
    "per-sample": _per_sample,
}
SHORT: Final = ("service", "small-jobs")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "benchmarks",
        nargs="*",
        type=_known,
        metavar="NAME",
        help=f"{', '.join(ALL)}; all of these; or cuda [{' '.join(SHORT)}: some minutes]",
    )
    parser.add_argument(
        "--pairs", type=_numbers, default=(64, 128, 256, 512), help="for memory [64,128,256,512]"
    )
    parser.add_argument("--timed-pairs", type=int, default=64, help="for time [64]")
    parser.add_argument(
        "--naive-limit", type=int, default=128, help="most pairs that naive code may try [128]"
    )
    parser.add_argument(
        "--service-pairs", type=int, default=128, help="for the service: 10 s or more [128]"
    )
    parser.add_argument(
        "--day-seconds", type=float, default=120.0, help="for eight hours of ten people [120]"
    )
    parser.add_argument("--queued", type=int, default=20_000, help="jobs that wait [20000]")
    parser.add_argument(
        "--cluster-pairs", type=int, default=512, help="for the cluster: 60 s or more [512]"
    )
    parser.add_argument(
        "--cluster-samples", type=int, default=2000, help="whose rows it projects [2000]"
    )
    parser.add_argument(
        "--scale-pairs", type=int, default=64, help="measured, to simulate with [64]"
    )
    parser.add_argument(
        "--autograd-pairs", type=int, default=64, help="for remote autograd: 5 s or more [64]"
    )
    parser.add_argument("--tasks", type=_names, default=tuple(ENCODERS), help="for retention [all]")
    parser.add_argument(
        "--samples", type=_numbers, default=(64, 256, 1024), help="for retention [64,256,1024]"
    )
    parser.add_argument("--timed-samples", type=int, default=256, help="most to take time of [256]")
    parser.add_argument(
        "--detailed-samples", type=int, default=256, help="measured at five budgets [256]"
    )
    parser.add_argument("--shards", type=_numbers, default=(8, 16), help="for retention [8,16]")
    parser.add_argument("--num-tokens", type=int, default=16, help="of its texts [16]")
    parser.add_argument("--retention-rounds", type=int, default=3, help="at the least [3]")
    parser.add_argument(
        "--retention-seconds",
        type=float,
        default=5,
        help="of its naive step, at the least: short steps take more rounds [5]",
    )
    parser.add_argument("--packed-pairs", type=int, default=64, help="for packing [64]")
    parser.add_argument("--packed-tokens", type=int, default=1024, help="of a shard [1024]")
    parser.add_argument("--device", help="for retention [cpu], and for cuda [cuda]")
    parser.add_argument("--parts", type=_names, default=CUDA_PARTS, help="of cuda [all]")
    parser.add_argument("--dry", action="store_true", help="of cuda, sizes of a trial run")
    parser.add_argument("--section", type=Path, help="of cuda: write that file, and no report")
    parser.add_argument(
        "--ends", action="store_true", help="of retention, only nothing and everything kept"
    )
    parser.add_argument(
        "--plot", type=Path, help="draw the curves of retention, or of scale, into this file"
    )
    parser.add_argument("--report", help="name of the report [the benchmark's]")
    parser.add_argument(
        "--mixed-shards",
        type=_numbers,
        default=(1, 2, 4, 8, 16, 32, 64),
        help="for mixed gradients: how many [1,2,4,8,16,32,64]",
    )
    parser.add_argument("--mixed-shard", type=int, default=4, help="samples of those [4]")
    parser.add_argument("--depth", type=int, default=16, help="their generator's blocks [16]")
    parser.add_argument(
        "--depths", type=_numbers, default=(4, 16, 64), help="for their memory [4,16,64]"
    )
    parser.add_argument(
        "--workloads", type=_names, default=tuple(PER_SAMPLE), help="of per-sample gradients [all]"
    )
    parser.add_argument(
        "--calls", action="store_true", help="of per-sample gradients the public calls alone"
    )
    parser.add_argument(
        "--against", type=Path, help="measure those of another source tree as well, in turn"
    )
    parser.add_argument("--shard", type=int, default=16, help="samples of a shard [16]")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds [5]")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch [1]")
    parser.add_argument("--out", type=Path, default=REPORTS, help="folder [benchmarks/reports]")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _known(name: str) -> str:
    if name not in {*ALL, "all", "cuda"}:
        raise argparse.ArgumentTypeError(f"expected {', '.join(ALL)}, all or cuda, got {name!r}")
    return name


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
