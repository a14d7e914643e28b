"""A model set up for the per-sample work of one job, called, and put back.

Setting up and putting back cost the same for one shard as for a thousand, so both happen once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map

from gradbox_engine.errors import BadInputs, NoBatchAxis
from gradbox_engine.model.calling.calls import entry_point
from gradbox_engine.model.calling.outputs import BARE, as_outputs, choose
from gradbox_engine.model.calling.shard_feed import call_arguments
from gradbox_engine.model.calling.shard_rng import begin_stream
from gradbox_engine.model.kernels import compiled_code_run_eagerly
from gradbox_engine.model.precision import AUTOCAST, accumulation_dtype, autocast, passes_float16
from gradbox_engine.model.prepared import configured, model_device
from gradbox_engine.model.state.buffers import Buffers
from gradbox_engine.model.tensor_equality import strided_parts
from gradbox_engine.model.weights import wide_dtype
from gradbox_engine.model.wrt import INPUTS, select
from gradbox_engine.requests import CallOptions, Mode, Precision

CHECKS = frozenset({"coupling", "self"})

CALL_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
)
"""What a model may raise at a number of samples, or at numbers, that it is not made for."""


@contextmanager
def callable_model(
    model: nn.Module,
    *,
    seed: int = 0,
    mode: Mode = "eval",
    wrt: Sequence[str] | None = None,
    precision: Precision = "fp32",
    output: str | int | None = None,
    readout: Callable[[Any, dict[str, Any]], Any] | None = None,
    weights: Mapping[str, Tensor] | None = None,
    method: str = "forward",
    unchecked: Sequence[str] = (),
    streams: Sequence[tuple[int, int]] | None = None,
    others: int = 0,
    first_shard: int = 0,
    in_against: bool = False,
) -> Iterator[CallableModel]:
    """Set a model up, with requires_grad on the wanted parameters alone, and put it back.

    Args:
        unchecked: checks to leave out: "coupling" (no sample sees another) and "self" (the rows
            are compared with autograd's gradient).
        streams: the numbers (k, i) that each shard's random stream is derived from; by default
            those of group 0, and 1 for other shards.
        others: how many of the first shards are other ones, see `OtherShards`.
        first_shard: the number of the first own shard in the job, where these are a range of it.
        in_against: whether the own shards are others of the job, whose rows come first.

    Raises:
        BadInputs: `unchecked` names something else, `wrt` inputs, or the model has no such method.
    """
    if not CHECKS.issuperset(unchecked):
        raise BadInputs(f"unchecked: expected some of {sorted(CHECKS)}, got {sorted(unchecked)}")
    options = CallOptions(
        seed=seed, mode=mode, precision=precision, output=output, readout=readout, weights=weights
    )
    selection = select(model, wrt)
    _refuse_inputs([name for name, needed in selection.input_patterns.items() if needed])
    parameters: dict[str, Tensor] = dict(selection.parameters)
    _refuse_other_parameters(parameters)
    device = model_device(model)
    with configured(model, parameters, options), compiled_code_run_eagerly():
        for module in model.modules():
            if isinstance(module, nn.EmbeddingBag):
                module.sparse = False  # which neither vmap nor a batched backward pass knows
        yield CallableModel(
            model,
            parameters,
            options,
            device,
            method,
            frozenset(unchecked),
            streams,
            others,
            first_shard,
            in_against,
        )


class CallableModel:
    """One model that is set up, and its buffers as the job found them."""

    def __init__(
        self,
        model: nn.Module,
        parameters: dict[str, Tensor],
        options: CallOptions,
        device: torch.device,
        method: str,
        unchecked: frozenset[str],
        streams: Sequence[tuple[int, int]] | None,
        others: int,
        first_shard: int,
        in_against: bool,
    ) -> None:
        self.model, self.parameters = model, parameters
        self.options, self.device, self.unchecked = options, device, unchecked
        self._streams, self.num_others = streams, others
        self._first_shard, self._in_against = first_shard, in_against
        # The narrowest dtype of a product.
        self.rounding = AUTOCAST.get(options.precision, torch.float64)
        self.in_float16 = passes_float16(model, options.precision)
        self.hooked = tuple(name for name, p in parameters.items() if p._backward_hooks)
        self._buffers = Buffers(model)
        self._method = method
        self._entry = entry_point(model, method, "method")

    def arguments(self, shard: Mapping[str, Any]) -> dict[str, Any]:
        """Return a shard's arguments on the model's device, in the job's precision."""
        wide = self.options.widened

        def moved(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            dtype = wide_dtype(value.dtype) if wide else value.dtype
            return value.detach().to(self.device, dtype)

        return {name: tree_map(moved, value) for name, value in shard.items()}

    def begin_stream(self, index: int) -> None:
        """Begin the random stream of shard `index`; leaving the model puts the generators back."""
        own = index - self.num_others
        default = (0, own + self._first_shard) if own >= 0 else (1, index)
        group, shard = default if self._streams is None else self._streams[index]
        begin_stream(self.options.seed, group, shard)

    def where(self, index: int) -> str:
        """Return how a message calls shard `index`."""
        own = index - self.num_others
        shard = f"shard {own + self._first_shard if own >= 0 else index}"
        return f"{shard} of those in against" if own < 0 or self._in_against else shard

    def call(self, arguments: dict[str, Any]) -> Tensor:
        """Return z of one shard, one row a sample, in float32 or wider.

        Args:
            arguments: `copied` ones, to which the model may write.
        """
        by_place, by_name = call_arguments(arguments)
        readout, precision = self.options.readout, self.options.precision
        with torch.enable_grad(), autocast(precision, self.device):
            value = choose(self._entry(*by_place, **by_name), self.options.output)
        if readout is not None:  # for itself: a model may leave gradients switched off
            with torch.enable_grad(), autocast(precision, self.device):
                value = readout(value, arguments)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            source = "model" if readout is None else "readout"
            value = as_outputs(value, source=source).get(BARE)
        if value is None or value.dim() == 0:
            raise NoBatchAxis(
                "per-sample quantities need one output tensor whose dim 0 counts samples, got "
                f"{'several' if value is None else 'a single number'}: use output= or readout="
            )
        found: Tensor = value
        narrow = found.dtype in (torch.float16, torch.bfloat16)
        return found.to(accumulation_dtype(found.dtype)) if narrow else found

    def restore_buffers(self) -> None:
        """Give every buffer the value it had when the job began, and no graph."""
        self._buffers.restore(self._buffers.first)

    def zeros(self) -> frozenset[str]:
        """Return the names of the parameters and buffers that are all zero."""
        return frozenset(name for name, tensor in self._tensors().items() if _all_zero(tensor))

    def all_zero(self, names: Collection[str]) -> bool:
        """Return whether these parameters and buffers are all zero."""
        tensors = self._tensors() if names else {}
        return all(name in tensors and _all_zero(tensors[name]) for name in names)

    def _tensors(self) -> dict[str, Tensor]:
        return dict(chain(self.model.named_parameters(), self.model.named_buffers()))

    def signature(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return what a plan for these arguments depends on."""
        sizes = tuple(
            (name, value.shape, value.dtype) if isinstance(value, Tensor) else (name, repr(value))
            for name, value in arguments.items()
        )
        options = self.options
        return (
            options.mode, options.precision, self._method, options.output, options.readout,
            tuple(self.parameters), self.hooked, self.unchecked, sizes,
        )  # fmt: skip


def copied(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies for one call: a model may write to its arguments, and is called again."""
    return {
        name: tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, value)
        for name, value in arguments.items()
    }


def _all_zero(tensor: Tensor) -> bool:
    if is_traceable_wrapper_subclass(tensor):
        return all(map(_all_zero, strided_parts(tensor)))
    dense = tensor.to_dense()
    last = dense[-1:] if dense.dim() else dense  # mostly tells, where a table's first row pads
    return not (last.any() or dense.any())


def _refuse_inputs(patterns: Collection[str]) -> None:
    if patterns:
        raise BadInputs(
            f"wrt: expected names of parameters, of which every sample has a row, got "
            f"{[INPUTS + pattern for pattern in patterns]}; a Gradient of the sum over samples "
            f"holds every sample's gradient with respect to its own inputs"
        )


def _refuse_other_parameters(parameters: Mapping[str, Tensor]) -> None:
    if not parameters:
        raise BadInputs(
            "wrt: expected a model with floating-point parameters, by which rows are made, got one "
            "without any; a Gradient with returns='input_grads' differentiates by its inputs"
        )
    names = [name for name, parameter in parameters.items() if parameter.is_complex()]
    if names:
        raise BadInputs(
            f"wrt: expected real parameters, got the complex {names}: leave them out by wrt=, or "
            "let the model hold them as real ones, by torch.view_as_real"
        )
