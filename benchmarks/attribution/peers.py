"""Scores, and rows a second, of public libraries: kronfluence, dattri, TRAK, bergson.

    python -m benchmarks.attribution.peers scores|rows PEER TASK WEIGHTS FILE

writes scores into a safetensors file, name → (Q, N), or prints the processor time, in seconds, of
the fastest pass over the training samples. Each is a process of its own, since libraries change
what they import. They are measured where they are installed.

What is set so that all compute the same:
    kronfluence  losses summed over a batch; the Fisher of the targets that were drawn for both
                 (`use_empirical_fisher`, or it would draw others); the same damping
    dattri       the Hessian of the mean loss, in float64; steps enough to converge; for TRAK, rows
                 of the model's output, weighted by 1 − `correct_probability_func`, and the same
                 checkpoint as often as rows are projected
    bergson      its hooks take texts: a sample of numbers is a text of one position
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.attribution.tasks import SKETCHES, TASKS, Loss, Task
from benchmarks.measure import QUIET, in_fresh_process

BATCH: Final = 200
CG_STEPS: Final = 200
PASSES: Final = 3
LAYER_DIM: Final = 16  # of rows and of columns, where each layer is projected by itself
ABSENT: Final = "not measured: pip install 'gradbox[bench,peers]'"

Scores = dict[str, Tensor]  # method → (Q, N)


def installed(peer: str) -> bool:
    """Return whether a peer can be measured here."""
    return importlib.util.find_spec(PACKAGES[peer]) is not None


def versions() -> str:
    """Return the peers that are installed, with their versions."""
    names = {"TRAK": "traker"}
    there = filter(installed, PACKAGES)
    return ", ".join(f"{peer} {metadata.version(names.get(peer, peer))}" for peer in there)


def peer_scores(peer: str, task: Task, weights: Path) -> Scores:
    """Return what a peer computes in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="gradbox-peer-") as folder:
        file = Path(folder) / "scores.safetensors"
        _run("scores", peer, task.name, weights, file)
        return load_file(file)


def peer_seconds(peer: str, task: Task, weights: Path) -> float:
    """Return the processor time of a peer's fastest pass over the samples, in a process too."""
    return float(_run("rows", peer, task.name, weights, Path()))


def _run(*arguments: str | Path) -> Any:
    return in_fresh_process("benchmarks.attribution.peers", *map(str, arguments), env=QUIET)


def main(what: str, peer: str, task: str, weights: str, file: str) -> None:
    """Run one peer in this process."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="gradbox-peer-") as folder:
        given = TASKS[task](), Path(weights), Path(folder)
        if what == "scores":
            scores = SCORES[peer](*given)
            save_file({method: one.contiguous() for method, one in scores.items()}, file)
            print("{}")
        else:
            print(json.dumps(_fastest(ROWS[peer](*given))))


def _kronfluence_scores(task: Task, weights: Path, folder: Path) -> Scores:
    from kronfluence.arguments import FactorArguments, ScoreArguments

    analyzer = _analyzer(task, weights, folder)
    train, queries = _datasets(task)
    drawn = TensorDataset(*task.fisher_samples(weights))
    scores = {}
    for strategy, method in {"identity": "dot", "kfac": "kfac", "ekfac": "ekfac"}.items():
        analyzer.fit_all_factors(
            factors_name=strategy,
            dataset=drawn,
            per_device_batch_size=BATCH,
            factor_args=FactorArguments(strategy=strategy, use_empirical_fisher=True),
        )
        analyzer.compute_pairwise_scores(
            scores_name=strategy,
            factors_name=strategy,
            query_dataset=queries,
            train_dataset=train,
            per_device_query_batch_size=len(queries),
            per_device_train_batch_size=BATCH,
            score_args=ScoreArguments(damping_factor=task.decay),
        )
        scores[method] = analyzer.load_pairwise_scores(strategy)["all_modules"]
    return scores


def _kronfluence_rows(task: Task, weights: Path, folder: Path) -> Callable[[], None]:
    from kronfluence.arguments import FactorArguments

    analyzer, (train, _) = _analyzer(task, weights, folder), _datasets(task)

    def run() -> None:
        analyzer.fit_lambda_matrices(
            factors_name="diagonal",
            dataset=train,
            per_device_batch_size=BATCH,
            factor_args=FactorArguments(strategy="diagonal", use_empirical_fisher=True),
            overwrite_output_dir=True,
        )

    return run


def _analyzer(task: Task, weights: Path, folder: Path) -> Any:
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.task import Task as Computed

    class Losses(Computed):  # type: ignore[misc]
        def compute_train_loss(self, batch: Any, model: Any, sample: bool = False) -> Tensor:
            x, y = batch
            return task.loss(model(x), y).sum()

        def compute_measurement(self, batch: Any, model: Any) -> Tensor:
            return self.compute_train_loss(batch, model)

    losses = Losses()
    return Analyzer(
        analysis_name=task.name,
        model=prepare_model(task.model(weights), losses),
        task=losses,
        cpu=True,
        disable_tqdm=True,
        output_dir=str(folder),
    )


def _dattri_scores(task: Task, weights: Path, _: Path) -> Scores:
    from dattri.algorithm.influence_function import IFAttributorCG
    from dattri.algorithm.trak import TRAKAttributor
    from dattri.task import AttributionTask

    model, (train, queries) = task.model(weights), _datasets(task)

    def rest(params: Any, data: Any) -> Tensor:
        x, y = (part.unsqueeze(0) for part in data)
        return 1 - task.slope(task.output(functional_call(model, params, (x,)), y), y)

    rows = AttributionTask(
        _mean(model, task.output),
        model,
        [model.state_dict()] * SKETCHES,
        target_func=_mean(model, task.loss),
    )
    # Its rows are divided by √P, and its kernel is a sum over samples: in gradbox a mean.
    scale = len(train) / sum(p.numel() for p in model.parameters())
    kernel = TRAKAttributor(
        rows,
        correct_probability_func=rest,
        projector_kwargs={"proj_dim": task.sketch_dim, "proj_type": "rademacher"},
        regularization=task.kernel_damping * scale,
    )
    kernel.cache(DataLoader(train, batch_size=BATCH))
    scores = {"trak": kernel.attribute(DataLoader(queries, batch_size=BATCH)).T}

    model = task.model(weights).double()
    whole, asked = (
        DataLoader(TensorDataset(*map(_double, part.tensors)), batch_size=len(part))
        for part in (train, queries)
    )
    by_cg = IFAttributorCG(
        AttributionTask(_mean(model, task.loss), model, model.state_dict()),
        max_iter=CG_STEPS,
        regularization=task.hessian_damping,
    )
    by_cg.cache(whole)
    with torch.no_grad():  # its parameters require gradients: it would keep the graph of all steps
        scores["hessian"] = by_cg.attribute(whole, asked).T
    return scores


def _mean(model: nn.Module, loss: Loss) -> Callable[[Any, Any], Tensor]:
    """Return the mean of a loss over a batch, or a loss of a sample without a dimension for it."""

    def mean(params: Any, data: Any) -> Tensor:
        x, y = data
        if x.ndim == 1:
            x, y = x.unsqueeze(0), y.unsqueeze(0)
        return loss(functional_call(model, params, (x,)), y).mean()

    return mean


def _trak_rows(task: Task, weights: Path, folder: Path) -> Callable[[], None]:
    from trak import TRAKer
    from trak.projectors import BasicProjector, ProjectionType

    model = task.model(weights)
    projector = BasicProjector(
        grad_dim=sum(p.numel() for p in model.parameters()),
        proj_dim=task.sketch_dim,
        seed=0,
        proj_type=ProjectionType.rademacher,
        device="cpu",
    )
    turns = iter(range(PASSES))

    def run() -> None:
        traker = TRAKer(
            model,
            task="image_classification",
            train_set_size=len(task.x),
            save_dir=str(folder / str(next(turns))),
            device="cpu",
            projector=projector,
            use_half_precision=False,
        )
        traker.load_checkpoint(model.state_dict(), model_id=0)
        for batch in DataLoader(_datasets(task)[0], batch_size=BATCH):
            traker.featurize(batch=batch, num_samples=len(batch[0]))

    return run


def _bergson_rows(task: Task, weights: Path, folder: Path) -> Callable[[], None]:
    from bergson import GradientCollector, GradientProcessor, IndexConfig
    from datasets import Dataset

    model: Any = task.model(weights)
    model.device = torch.device("cpu")
    indices = list(range(len(task.x)))
    turns = iter(indices)

    def run() -> None:
        collector = GradientCollector(
            model=model,
            data=Dataset.from_dict({"sample": indices}),
            cfg=IndexConfig(run_path=str(folder / str(next(turns))), drop_columns=False),
            processor=GradientProcessor(projection_dim=LAYER_DIM, include_bias=True),
        )
        for first in range(0, len(indices), BATCH):
            batch = slice(first, first + BATCH)
            with collector:
                x = task.x[batch]
                z = model(x.unsqueeze(1)).squeeze(1) if x.is_floating_point() else model(x)
                losses = task.loss(z, task.y[batch])
                losses.sum().backward()
            collector.process_batch(indices[batch], losses=losses)
        collector.teardown()

    return run


def _fastest(run: Callable[[], None]) -> float:
    seconds = []
    for _ in range(PASSES):
        start = time.process_time()
        run()
        seconds.append(time.process_time() - start)
    return min(seconds)


def _datasets(task: Task) -> tuple[TensorDataset, TensorDataset]:
    return (
        TensorDataset(task.x, task.y),
        TensorDataset(task.query_x, task.query_y),
    )


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


PACKAGES: Final = {
    "kronfluence": "kronfluence",
    "dattri": "dattri",
    "TRAK": "trak",
    "bergson": "bergson",
}
SCORES: Final[Mapping[str, Callable[[Task, Path, Path], Scores]]] = {
    "kronfluence": _kronfluence_scores,
    "dattri": _dattri_scores,
}
ROWS: Final[Mapping[str, Callable[[Task, Path, Path], Callable[[], None]]]] = {
    "TRAK": _trak_rows,
    "kronfluence": _kronfluence_rows,
    "bergson": _bergson_rows,
}


if __name__ == "__main__":
    main(*sys.argv[1:])
