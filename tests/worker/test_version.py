"""A model's version changes with what the model is, and with nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from gradbox_worker.models.version import model_version
from tests.worker import zoo


def affine() -> zoo.Affine:
    torch.manual_seed(0)
    return zoo.Affine()


def test_the_version_is_the_same_in_another_process() -> None:
    code = (
        "import torch; from tests.worker import zoo; torch.manual_seed(0); "
        "from gradbox_worker.models.version import model_version; "
        "print(model_version(zoo.Affine()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == model_version(affine())


def test_the_version_does_not_depend_on_the_mode() -> None:
    assert model_version(affine().train()) == model_version(affine().eval())


def test_one_bit_of_one_weight_changes_the_version() -> None:
    model = affine()
    with torch.no_grad():
        model.linear.bias[1] = torch.nextafter(model.linear.bias[1], torch.tensor(9.0))
    assert model_version(model) != model_version(affine())


def test_a_buffer_that_is_not_saved_counts() -> None:
    torch.manual_seed(0)
    first = zoo.Tied(2.0)
    torch.manual_seed(0)
    second = zoo.Tied(3.0)
    assert model_version(first) != model_version(second)


def test_tying_counts_even_where_values_agree() -> None:
    tied, untied = zoo.Tied(), zoo.Tied()
    untied.load_state_dict(tied.state_dict())
    assert model_version(tied) == model_version(untied)
    untied.second.weight = nn.Parameter(untied.first.weight.detach().clone())
    assert model_version(tied) != model_version(untied)


def test_an_attribute_that_shapes_the_forward_counts() -> None:
    versions = set()
    for heads in (2, 4):
        torch.manual_seed(0)
        versions.add(model_version(zoo.Heads(heads)))
    assert len(versions) == 2


def test_another_class_with_the_same_weights_is_another_model() -> None:
    class Relabelled(zoo.Affine):
        pass

    model = affine()
    model.__class__ = Relabelled
    assert model_version(model) != model_version(affine())


def test_the_dtype_counts() -> None:
    zeros = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(zeros.weight)
    assert model_version(zeros) != model_version(zeros.half())


def test_a_function_as_an_attribute_counts_by_its_name() -> None:
    model, other = affine(), affine()
    model.activation = torch.relu  # type: ignore[assignment]
    other.activation = torch.tanh  # type: ignore[assignment]
    assert model_version(model) != model_version(other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.bool, torch.int64])
def test_every_dtype_has_bytes(dtype: torch.dtype) -> None:
    model = nn.Module()
    model.register_buffer("b", torch.zeros(3, dtype=dtype))
    other = nn.Module()
    other.register_buffer("b", torch.ones(3, dtype=dtype))
    assert model_version(model) != model_version(other)


@pytest.mark.parametrize(
    "view",
    [torch.randn(5, 2)[:1, 1], torch.randn(3, dtype=torch.complex64).conj()],
    ids=["one of a column", "conjugated"],
)
def test_a_view_counts_by_its_values(view: torch.Tensor) -> None:
    model, other = nn.Module(), nn.Module()
    model.register_buffer("b", view)
    other.register_buffer("b", torch.tensor(view.tolist()))
    assert model_version(model) == model_version(other)


def test_a_tensor_without_bytes_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="weight: expected a dense tensor"):
        model_version(nn.Linear(2, 2, device="meta"))
