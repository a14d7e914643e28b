"""Which kernels a job runs, and that the switches are as they were afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradbox_engine.model.kernels import suits_cudnn
from gradbox_engine.model.precision import arithmetic


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_the_older_switch_for_tensorfloat_agrees(precision):
    with arithmetic(precision):
        # As a model does that is compiled in a job; torch raises where the two disagree.
        assert torch.backends.cuda.matmul.allow_tf32 == (precision == "tf32")


def test_both_switches_are_put_back():
    before = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.fp32_precision
    with arithmetic("tf32"):
        pass
    after = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.fp32_precision
    assert after == before


def test_a_process_that_set_the_newer_switch_alone_may_run_jobs():
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        with arithmetic("fp32"):
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"


@pytest.mark.parametrize(
    ("layer", "suits"),
    [
        (nn.LSTM(2, 2), True),
        (nn.LSTM(2, 2).eval(), False),  # no backward pass
        (nn.GRU(2, 2, num_layers=2), True),
        (nn.GRU(2, 2, num_layers=2, dropout=0.1), False),  # masks that no replay repeats
    ],
    ids=str,
)
def test_cudnn_runs_recurrent_layers_that_it_can_serve(layer, suits):
    assert suits_cudnn(layer) == suits
