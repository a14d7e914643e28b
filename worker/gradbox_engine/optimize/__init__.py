"""Training: the update in which a step's gradient ends.

Read `training_state`, what a run is made of and one step of it, then `optimizers`: which of
`torch.optim` there are, and what they may be given.
"""

from gradbox_engine.optimize.optimizers import OptimizerChoice, ParameterGroup
from gradbox_engine.optimize.training_state import TrainingState, Updated

__all__ = ["OptimizerChoice", "ParameterGroup", "TrainingState", "Updated"]
