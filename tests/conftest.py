"""Every test process computes on one thread and never asks a model hub."""

from __future__ import annotations

import os

import torch

os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)
