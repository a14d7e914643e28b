"""No graph reaches memory that is not its own through a kernel that trusts its arguments."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gradbox.errors import GraphRefused, UntraceableLoss
from gradbox.graphs import allow_list
from gradbox.tracing.trace import trace
from gradbox_worker.interpreting.build import build
from tests.graphs.test_refused import NODE_Z, call, graph_of

UNCHECKED = [
    "torch.nn.functional.grid_sample",
    "torch.linalg.lu_solve",
    "torch.linalg.ldl_solve",
    "torch.nn.functional.embedding_bag",
    "torch.nn.functional.max_unpool2d",
    "torch.segment_reduce",
]
T = {"node": "t"}
N = "torch.nn.functional."


def aligned(input_lengths: list[float], target_lengths: list[float]) -> dict[str, Any]:
    return call(N + "ctc_loss", NODE_Z, T, input_lengths, target_lengths)


PREPARED = [
    {"op": "placeholder", "name": "t", "target": "t"},
    call("operator.getitem", NODE_Z, {"slice": [0, 0, None]}, name="none"),
    call("narrow", NODE_Z, 1, 0, 0, op="call_method", name="sideless"),
    call("int", T, op="call_method", name="short"),
]
TRUSTING = {
    "a label above the classes": ([9, 0], call(N + "multi_margin_loss", NODE_Z, T)),
    "a label below the classes": ([-1, 0], call(N + "multi_margin_loss", NODE_Z, T)),
    "a label of many": ([[9, 0], [0, 0]], call(N + "multilabel_margin_loss", NODE_Z, T)),
    "a negative count": ([1000, -999], call("torch.repeat_interleave", NODE_Z, T, 0)),
    "a negative count of itself": ([1000, -999], call("torch.repeat_interleave", T, output_size=1)),
    "a negative count in a method": (
        [1000, -999],
        call("repeat_interleave", NODE_Z, T, dim=0, output_size=1, op="call_method"),
    ),
    "another size than the counts make": (
        [4, 4],
        call("torch.repeat_interleave", NODE_Z, repeats=T, dim=0, output_size=2),
    ),
    "counts that wrap around 64 bits": (
        [2**62] * 4 + [1],
        call("torch.repeat_interleave", T, T),
    ),
    "a dilation that wraps around": (
        [0],
        call(N + "max_pool1d", NODE_Z, 5, stride=1, dilation=2**62),
    ),
    "a kernel in a list": ([0], call(N + "avg_pool1d", NODE_Z, [2**61])),
    "a stride in three dimensions": ([0], call(N + "max_pool3d", NODE_Z, 1, stride=2**62)),
    "a mean over volumes": ([0], call(N + "avg_pool3d", NODE_Z, [1, 1, 2**61])),
    "an output of three dimensions": ([0], call(N + "adaptive_max_pool3d", NODE_Z, 2**40)),
    "a mean of three dimensions": ([0], call(N + "adaptive_avg_pool3d", NODE_Z, [2**40] * 3)),
    "a stride that crashes a backward": ([0], call(N + "conv1d", NODE_Z, NODE_Z, None, 65536)),
    "a stride that crashes a backward, by name": (
        [0],
        call(N + "conv2d", NODE_Z, NODE_Z, stride=[1, 4096]),
    ),
    "a transposed stride": (
        [0],
        call(N + "conv_transpose1d", NODE_Z, NODE_Z, None, 65),
    ),
    "a transposed stride, by name": (
        [0],
        call(N + "conv_transpose2d", NODE_Z, NODE_Z, stride=[1, 2**62]),
    ),
    "an output padding that wraps around": (
        [0],
        call(N + "conv_transpose3d", NODE_Z, NODE_Z, output_padding=2**62),
    ),
    "places from windows that wrap around": (
        [0],
        call(N + "max_pool2d_with_indices", NODE_Z, 2**61),
    ),
    "a sound above the classes": ([[1, 2]], aligned([2], [2])),
    "a sound below the classes": ([[1, -1]], aligned([2], [2])),
    "sounds that are not integers": ([[0.5, 1.0]], aligned([2], [2])),
    "more positions than there are": ([[1, 1]], aligned([3], [2])),
    "fewer positions than none": ([[1, 1]], aligned([-1], [2])),
    "more sounds than there are": ([[1, 1]], aligned([2], [2**40])),
    "lengths that do not add up": ([1, 1], aligned([2], [1])),
    "lengths in halves": ([[1, 1]], aligned([2], [0.5])),
    "a stride that a tensor holds": (65536, call(N + "conv1d", NODE_Z, NODE_Z, None, T)),
    "a stride in a list of tensors": (65536, call(N + "conv1d", NODE_Z, NODE_Z, stride=[T])),
    "a dilation that a tensor holds": (
        2**61,
        call(N + "max_pool1d", NODE_Z, 5, stride=1, dilation=[T]),
    ),
    "a million pieces that a tensor asks for": (10**6, call("torch.tensor_split", NODE_Z, T)),
    "a million chunks that a tensor asks for": (
        10**6,
        call("chunk", NODE_Z, T, op="call_method"),
    ),
    "pairs of no rows": ([0], call("torch.pdist", {"node": "none"})),
    "a system without right-hand sides": (
        [0],
        call("torch.linalg.lstsq", NODE_Z, {"node": "sideless"}, driver="gelss"),
    ),
    "a power without an absolute value": (-(2**63), call("torch.matrix_power", NODE_Z, T)),
    "a power of a method": (-(2**63), call("matrix_power", NODE_Z, T, op="call_method")),
    "the lowest integer by -1": (
        [-(2**63), -1],
        call("torch.div", T, -1, rounding_mode="trunc"),
    ),
    "the lowest integer by -1 in place": (
        [-(2**63), -1],
        call("div_", T, -1, op="call_method", rounding_mode="trunc"),
    ),
    "a multiple of the lowest integer": ([-(2**63), 6], call("torch.lcm", T, T)),
    "a multiple of the lowest of 32 bits": (
        [-(2**31), 6],
        call("lcm_", {"node": "short"}, {"node": "short"}, op="call_method"),
    ),
    "tuples of a length that a tensor holds": (
        65,
        call("torch.combinations", NODE_Z, r=T, with_replacement=True),
    ),
    "tuples without end": ([0], call("torch.combinations", T, 10_000, True)),
    "dimensions without end": ([0], call("torch.tensordot", NODE_Z, NODE_Z, dims=2**40)),
    "a negative padding": ([0], call(N + "pad", NODE_Z, [-(2**62), 2**62])),
}


@pytest.mark.parametrize("name", UNCHECKED)
def test_a_kernel_that_checks_nothing_is_not_on_the_list(name: str) -> None:
    assert name not in allow_list.FUNCTIONS


@pytest.mark.parametrize("attack", TRUSTING)
def test_what_a_kernel_would_believe_is_refused_before_it_runs(attack: str) -> None:
    values, node = TRUSTING[attack]
    function = build(graph_of(*PREPARED, node), {}, device="cpu")
    with pytest.raises(GraphRefused, match=node["target"]):
        function(torch.ones(2, 2), torch.tensor(values))


@pytest.mark.parametrize("method", ["median", "nanmedian"])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_median_reads_nothing_beyond_an_expanded_tensor(method: str, dim: int) -> None:
    wide = call("expand", {"node": "t"}, 3, 7, op="call_method", name="wide")
    median = call(method, {"node": "wide"}, dim, op="call_method", name="median")
    values = call("operator.getitem", {"node": "median"}, 0)
    function = build(graph_of(PREPARED[0], wide, median, values), {}, device="cpu")
    memory = torch.arange(40.0)  # the first entries are the tensor's, the others somebody else's
    own = memory[:7] if dim == 0 else memory[:3, None]
    assert torch.equal(function(torch.ones(2, 2), own), own.flatten())


def test_no_kernel_ends_the_process_over_integers_at_the_ends_of_their_dtypes() -> None:
    program = [sys.executable, "-m", "tests.graphs.extreme_integers"]
    done = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "done")


def test_multiples_and_tuples_that_are_right_pass() -> None:
    def function(n: torch.Tensor) -> torch.Tensor:
        return torch.lcm(n, n.flip(0)).sum() + n.lcm(n[1]).sum() + torch.combinations(n, 3).sum()

    n = torch.tensor([4, -6, 0, 2**40])
    traced = trace(function, positional=1)
    assert build(traced.graph, traced.tensors, device="cpu")(n) == function(n)


def test_powers_medians_and_truncated_quotients_that_are_right_pass() -> None:
    def function(z: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        quotients = torch.div(n, -1, rounding_mode="trunc").sum() + n.div(2, rounding_mode="trunc")
        pieces = z.chunk(n, dim=1)[1].sum() + z.tensor_split(n.reshape(1), dim=1)[1].sum()
        return (torch.matrix_power(z, n) + quotients + pieces + torch.pdist(z)).sum() + z.median()

    z, n = torch.tensor([[0.5, 2.0], [1.0, 0.25]], requires_grad=True), torch.tensor(2)
    traced = trace(function, positional=1, arguments=["n"])
    assert build(traced.graph, traced.tensors, device="cpu")(z, n=n) == function(z, n)


def test_a_refused_loss_says_what_to_do() -> None:
    def sampled(z: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(z, z)

    with pytest.raises(UntraceableLoss, match="on your side"):
        trace(sampled, positional=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_convolution_in_sixteen_bits_is_rounded_once(dtype: torch.dtype) -> None:
    weight = torch.randn(2, 3, 2, dtype=dtype)

    def function(z: torch.Tensor) -> torch.Tensor:
        return F.conv_transpose1d(F.conv1d(z, weight.mT), weight=weight)

    z = torch.randn(1, 2, 9, dtype=dtype, requires_grad=True)
    traced = trace(function, positional=1)
    found = build(traced.graph, traced.tensors, device="cpu")(z)
    middle = F.conv1d(z.float(), weight.mT.float()).to(dtype)
    assert torch.equal(found, F.conv_transpose1d(middle.float(), weight.float()).to(dtype))
    (gradient,) = torch.autograd.grad(found.sum(), z)
    assert gradient.dtype == dtype


def test_counts_and_labels_that_are_right_pass() -> None:
    counts = torch.tensor([1, 2])

    def function(z: torch.Tensor) -> torch.Tensor:
        rows = torch.repeat_interleave(z, counts, dim=0, output_size=3)
        rows = torch.cat([rows, z.repeat_interleave(2, 0), z.repeat_interleave(counts, dim=0)])
        many = F.multilabel_margin_loss(z, torch.tensor([[2, 0, -1], [-1, -1, -1]]))
        return rows.square().sum() + F.multi_margin_loss(z, counts) + many

    z = torch.arange(6.0).reshape(2, 3)
    traced = trace(function, positional=1)
    assert build(traced.graph, traced.tensors, device="cpu")(z) == function(z)


def test_a_padding_may_have_any_value() -> None:
    lowest = -(10**9)

    def function(z: torch.Tensor) -> torch.Tensor:
        return F.pad(z, (0, 1), "constant", lowest) + F.pad(z, (1, 0), value=lowest)

    z = torch.ones(2, 2)
    traced = trace(function, positional=1)
    assert torch.equal(build(traced.graph, {}, device="cpu")(z), function(z))
