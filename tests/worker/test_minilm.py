"""A real pretrained model through a real worker, against the naive backward with the same masks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gradbox.protocol import GradientSpec, GraphLoss, InputGroup, JobState, ShardRef, TracedFunction
from gradbox.tracing.trace import trace
from gradbox_engine import shard_stream
from gradbox_worker.demo.task import model_folder
from tests.worker.box import running_box, running_worker

TOLERANCE = 1e-4  # fp32, twelve layers
SEED = 3


def pooled(output: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    mask = inputs["attention_mask"].unsqueeze(-1).to(output.dtype)
    return (output * mask).sum(1) / mask.sum(1)


def info_nce(queries: Tensor, passages: Tensor) -> Tensor:
    scores = F.normalize(queries, dim=-1) @ F.normalize(passages, dim=-1).T / 0.05
    return F.cross_entropy(scores, torch.arange(queries.shape[0]))


def tokens(num_shards: int, *, seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shards = []
    for length in range(6, 6 + num_shards):
        mask = torch.ones(2, length, dtype=torch.int64)
        mask[1, -2:] = 0
        ids = torch.randint(1000, 20000, (2, length), generator=generator)
        shards.append({"input_ids": ids, "attention_mask": mask})
    return shards


@pytest.mark.slow  # `gradbox demo` and README's block prove the same on whole boxes
def test_minilm_with_dropout_agrees_with_the_naive_backward(tmp_path: Path) -> None:
    towers = {"queries": tokens(2, seed=1), "passages": tokens(3, seed=2)[1:]}
    with running_box(tmp_path) as box:
        box.models_file.write_text(
            f'[models.minilm]\nbuilder = "hf"\nsource = "{model_folder()}"\n'
        )
        with running_worker(box):
            spec = GradientSpec(
                computation="gradient",
                model="minilm",
                inputs=[
                    InputGroup(
                        name=name, shards=[ShardRef(blob=box.upload(shard)) for shard in shards]
                    )
                    for name, shards in towers.items()
                ],
                output="last_hidden_state",
                readout=TracedFunction(graph=trace(pooled, positional=2, structured=True).graph),
                loss=GraphLoss(
                    function=TracedFunction(
                        graph=trace(info_nce, arguments=["queries", "passages"]).graph
                    )
                ),
                mode="train",
                seed=SEED,
                wrt=["encoder.layer.[05].*", "embeddings.word_embeddings.weight"],
            )
            record = box.wait(box.submit(spec), timeout_s=60)
            assert record.state is JobState.DONE, record.error
            tensors, receipt = box.result(record)

    loss, expected = naive(towers)
    assert abs(receipt.loss - loss) < TOLERANCE
    assert receipt.shards == {"queries": 2, "passages": 2}
    assert list(receipt.names) == [
        name
        for name in expected
        if name.startswith(("encoder.layer.0", "encoder.layer.5"))
        or name == "embeddings.word_embeddings.weight"
    ]
    largest = max(float(expected[name].norm()) for name in receipt.names)
    for name in receipt.names:
        difference = float((tensors[f"grads/{name}"] - expected[name]).norm())
        assert difference <= TOLERANCE * max(float(expected[name].norm()), largest / 1000), name


def naive(towers: dict[str, list[dict[str, Tensor]]]) -> tuple[float, dict[str, Tensor]]:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(model_folder(), dtype=torch.float32).train()
    embeddings = []
    for group, shards in enumerate(towers.values()):
        outputs = []
        for index, shard in enumerate(shards):
            with shard_stream(SEED, group, index):
                outputs.append(pooled(model(**shard).last_hidden_state, shard))
        embeddings.append(torch.cat(outputs))
    loss = info_nce(*embeddings)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
