"""One remote model in several threads."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

import pytest
import torch
from torch import Tensor

from gradbox.remote import RemoteModel
from tests import case_models
from tests.boxes import TestBox
from tests.client.remote import NaiveModel
from tests.client.test_remote_oracle import shards_of
from tests.oracle import TOLERANCE, difference

NUM_THREADS = 4
NUM_CALLS = 4
NUM_TRIALS = 5


@pytest.fixture
def often_switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def step(shards: list[Tensor], *, f: RemoteModel, begin: Barrier) -> list[Tensor]:
    begin.wait()
    zs = [f(x) for x in shards]
    torch.stack([z.square().sum() for z in zs]).sum().backward()
    return [z.detach() for z in zs]


@pytest.mark.usefixtures("often_switching")
def test_threads_that_call_and_differentiate_have_each_their_own(twin: TestBox) -> None:
    shards = [shards_of(*[2] * NUM_CALLS) for _ in range(NUM_THREADS)]
    for number, ours in enumerate(shards, start=1):
        for x in ours:
            x.mul_(number)
    naive = NaiveModel(case_models.mlp())
    expected = [[naive(x) for x in ours] for ours in shards]
    sum(z.square().sum() for zs in expected for z in zs).backward()
    for _ in range(NUM_TRIALS):
        with twin.client() as client, ThreadPoolExecutor(NUM_THREADS) as threads:
            f = client.model("mlp")
            ours = partial(step, f=f, begin=Barrier(NUM_THREADS))
            found = list(threads.map(ours, shards))
        torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
        assert difference(f.grads, naive.grads) <= TOLERANCE
