"""The allow-list means what it says, in the torch that is installed."""

from __future__ import annotations

import contextlib
import inspect
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from gradbox.graphs import allow_list, targets
from gradbox.graphs.check import PLACES
from gradbox.tracing.trace import trace

NEVER = """
    apply_ map_ map2_ backward data requires_grad_ register_hook retain_grad numpy tolist item
    storage untyped_storage set_ resize_ share_memory_ data_ptr type new empty record_stream
    uniform_ normal_ random_ bernoulli multinomial pin_memory as_strided as_subclass module_load
""".split()


def test_every_function_exists_and_is_found_by_its_name() -> None:
    assert targets.FUNCTIONS.keys() == set(allow_list.FUNCTIONS)
    for name, function in targets.FUNCTIONS.items():
        assert callable(function), name
        assert targets.name_of(function) == name


def test_every_method_is_a_method_of_a_tensor() -> None:
    assert all(callable(getattr(torch.Tensor, name)) for name in allow_list.METHODS)
    assert all(name.endswith("_") for name in allow_list.IN_PLACE)
    assert all(not name.startswith("_") for name in allow_list.METHODS)


def test_every_dtype_format_and_attribute_exists() -> None:
    tensor = torch.zeros(2, 2, dtype=torch.complex64)
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in allow_list.DTYPES)
    assert all(hasattr(torch, name) for name in allow_list.MEMORY_FORMATS)
    assert all(getattr(tensor, name) is not None for name in allow_list.TENSOR_ATTRIBUTES)


def test_what_reaches_beyond_the_graph_is_not_on_the_list() -> None:
    assert not allow_list.METHODS & set(NEVER)
    assert not allow_list.ATTRIBUTES & set(NEVER)
    assert not set(allow_list.FUNCTIONS) & {f"torch.{name}" for name in NEVER}


def test_nothing_random_is_on_the_list() -> None:
    words = ("rand", "dropout", "bernoulli", "multinomial", "gumbel", "normal_")
    names = (*allow_list.FUNCTIONS, *allow_list.METHODS)
    assert [name for name in names if any(word in name for word in words)] == []


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (F.cosine_similarity, "torch.cosine_similarity"),
        (F.pdist, "torch.pdist"),
        (F.relu, "torch.nn.functional.relu"),
        (torch.relu, "torch.relu"),
        (torch.functional.einsum, "torch.einsum"),
        (torch.special.softmax, "torch.special.softmax"),
    ],
)
def test_a_function_with_several_names_has_one_in_a_graph(function: object, name: str) -> None:
    assert targets.name_of(function) == name


def test_every_argument_with_a_rule_is_known_by_its_place() -> None:
    found: dict[str, dict[str, int]] = {}
    for name, function in targets.FUNCTIONS.items():
        with contextlib.suppress(ValueError, TypeError):  # a builtin: by keyword only
            for place, parameter in enumerate(inspect.signature(function).parameters.values()):
                ruled = parameter.name in {
                    *allow_list.FORBIDDEN_KEYWORDS,
                    *allow_list.ZERO_KEYWORDS,
                    "inplace",
                    "device",
                }
                if ruled and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
                    found.setdefault(name, {})[parameter.name] = place
    # Builtins that take it by position, too, which their signatures don't say.
    found["torch.nn.functional.scaled_dot_product_attention"] = {"dropout_p": 4}
    assert found == PLACES


def test_operators_of_tensors_and_methods_with_underscores_are_written_as_operators() -> None:
    constant = torch.arange(3.0)

    def loss(z: torch.Tensor) -> torch.Tensor:
        return (2 / constant - z**constant + (1 - constant) // z + constant[z > 0].sum()).sum()

    graph = trace(loss, positional=1).graph
    calls = {node.target for node in graph.nodes if node.op.startswith("call")}
    assert not [name for name in calls if "__" in name]


def test_checking_a_graph_loads_no_torch() -> None:
    code = (
        "import sys, gradbox.graphs.allow_list, gradbox.graphs.schema, gradbox.graphs.check, "
        "gradbox.builtin_losses.signatures; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=500).returncode == 0
