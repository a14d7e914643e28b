"""Training on the box: a run has weights, an optimizer's state and a step number there.

    run = client.train("minilm", optimizer=Optimizer("adamw", lr=2e-5), wrt="encoder.layer.5.*")
    step = run.step(inputs=shards, loss=info_nce, lr=1e-5)

Read `run` first, then `step`: what is posted, which is a `Gradient` with a number, and what comes
back. `begin` and `optimizer` are what a run is made of. `model` is the model at a run's weights as
a callable, whose cotangents a step is made of; it needs torch. `plot` draws a history,
`of_client` is what a client has of runs.
"""

from gradbox.runs.optimizer import LoRA, Optimizer
from gradbox.runs.run import RunClient, RunState, TrainRun
from gradbox.runs.step import TrainStep

__all__ = ["LoRA", "Optimizer", "RunClient", "RunState", "TrainRun", "TrainStep"]
