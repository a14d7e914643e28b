"""The example program of a model: valid Python for every kind of input, and a gap where none is."""

from __future__ import annotations

import pytest

from gradbox.protocol import ExampleInput, ExampleView, MethodView, ModelView


def view(example: ExampleView | None) -> ModelView:
    methods = {"forward": MethodView(arguments=["ids", "mask"], required=["ids"])}
    return ModelView(name="m", version="v", methods=methods, example=example)


def given(dtype: str, high: int | None = None, *, shape: tuple[int, ...] = (2, 3)) -> str:
    tensor = ExampleInput(name="x", shape=list(shape), dtype=dtype, high=high)
    example = ExampleView(method="forward", inputs=[tensor], output_shape=[2])
    code = view(example).example_code()
    compile(code, "example", "exec")
    return next(line.strip() for line in code.splitlines() if line.startswith('    "x"'))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (given("float32"), '"x": torch.randn(2, 3),'),
        (given("bfloat16"), '"x": torch.randn(2, 3, dtype=torch.bfloat16),'),
        (given("int64", 30), '"x": torch.randint(30, (2, 3)),'),
        (given("int32", 30, shape=(2,)), '"x": torch.randint(30, (2,), dtype=torch.int32),'),
        (given("int64", 2), '"x": torch.ones(2, 3, dtype=torch.int64),'),
    ],
)
def test_inputs_are_tensors_of_their_dtype_and_shape(line: str, says: str) -> None:
    assert line == says


def test_method_and_output_are_named_where_a_job_needs_them() -> None:
    example = ExampleView(method="text", inputs=[], output="logits", output_shape=[2])
    code = view(example).example_code()
    assert 'method="text",' in code
    assert 'output="logits",' in code


def test_without_a_call_the_arguments_are_left_to_the_reader() -> None:
    code = view(None).example_code()
    compile(code, "example", "exec")
    assert '"ids": ...,  # a tensor' in code
    assert '"mask"' not in code
