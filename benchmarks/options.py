"""What `python -m benchmarks` can be told."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.per_sample.workloads import WORKLOADS as PER_SAMPLE
from benchmarks.report import REPORTS
from benchmarks.set_loss.workloads import ENCODERS

SHORT: Final = ("service", "small-jobs")
CUDA_PARTS: Final = ("engine", "per-sample", "upload", "decoder", "mixed", "graphs", "service")


def options(benchmarks: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of the command line.

    Args:
        benchmarks: their names.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "benchmarks",
        nargs="*",
        type=partial(_known, names=[*benchmarks, "all", "cuda"]),
        metavar="NAME",
        help=f"{', '.join(benchmarks)}; all of these; or cuda [{' '.join(SHORT)}: some minutes]",
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
    parser.add_argument("--training-pairs", type=int, default=64, help="of a step of a run [64]")
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
        "--plot",
        type=Path,
        help="draw what retention, batch-sizes or scale found into this file",
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
    parser.add_argument(
        "--subsets", type=int, default=100, help="that attribution retrains models on [100]"
    )
    parser.add_argument("--shard", type=int, default=16, help="samples of a shard [16]")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds [5]")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch [1]")
    parser.add_argument("--out", type=Path, default=REPORTS, help="folder [benchmarks/reports]")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _known(name: str, *, names: Sequence[str]) -> str:
    if name not in names:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(names)}, got {name!r}")
    return name


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))
