"""A network of two layers, 8 → 16 → 4, with weights drawn from a fixed seed."""

import torch
from torch import nn


def build() -> nn.Module:
    """Return the model; its input is `input`, shape (B, 8), and its output has shape (B, 4)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 4))
