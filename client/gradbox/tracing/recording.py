"""The graph while it is recorded: which nodes may enter it, and what becomes of real tensors."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any, Final

import torch
from torch.fx import Graph as FxGraph
from torch.fx import Node, Proxy
from torch.fx.proxy import GraphAppendingTracer
from torch.overrides import TorchFunctionMode

from gradbox.errors import UntraceableLoss
from gradbox.graphs import allow_list, targets
from gradbox.graphs.check import argument, is_zero
from gradbox.graphs.schema import MAX_NODES
from gradbox.tracing.calls import (
    drops_nothing,
    dtype_meant,
    is_method,
    plain_method,
    with_default_dtype,
)
from gradbox.tracing.refusals import HOOKED, KEPT, ON_YOUR_SIDE, foreign, instead_of
from gradbox.tracing.source_location import untraceable
from gradbox.tracing.symbols import VIEWS, Symbol
from gradbox.tracing.writes import writes


class Recording(GraphAppendingTracer):
    """A torch.fx tracer that admits allowed operations only and gives real tensors a name.

    Args:
        graph: where the nodes go.
        parameters: the tensors whose gradients are wanted, by name.
        buffers: those of a module's buffers, which keep their names.
        structured: any public attribute of a symbol may be a field.

    Attributes:
        refused: what the function tried and no graph can hold.
    """

    def __init__(
        self,
        graph: FxGraph,
        *,
        parameters: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        structured: bool,
    ) -> None:
        super().__init__(graph)
        self.constants: dict[str, torch.Tensor] = {}
        self.parameters: dict[str, torch.Tensor] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self.writes = False
        self.refused: list[UntraceableLoss] = []
        self.structured = structured
        self._names = {id(tensor): name for name, tensor in parameters.items()}
        self._buffers = {id(tensor): name for name, tensor in buffers.items()}
        self._nodes: dict[int, Node] = {}
        self._grad_enabled = True
        self._autocast = _autocast_state()

    def argument(self, name: str) -> Symbol:
        """Add an argument of the function."""
        return self.proxy(self.graph.placeholder(name))

    def output(self, result: Any) -> None:
        """End the graph."""
        self.graph.output(self.create_arg(result))

    def proxy(self, node: Node) -> Symbol:
        return Symbol(node, self)

    def create_node(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        type_expr: Any = None,
    ) -> Node:
        if len(self.graph.nodes) >= MAX_NODES:
            raise self.refusal(
                f"the function makes more than {MAX_NODES} operations",
                "a Python loop was unrolled: write it with batched operations",
            )
        if kind == "call_method":
            target, args, kwargs = plain_method(target, args, kwargs)
            kind = "call_method" if isinstance(target, str) else "call_function"
        kwargs = {
            name: value
            for name, value in kwargs.items()
            if value or name not in allow_list.FORBIDDEN_KEYWORDS
        }
        self._admit(kind, target, args, kwargs)
        self._record_grad_mode()
        self.writes = self.writes or writes(kind, target, args, kwargs)
        return self.graph.create_node(kind, target, args, kwargs, name, type_expr)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Proxy) and a.tracer is not self:
            raise self.refusal(*KEPT)
        if isinstance(a, torch.Tensor):
            return self._tensor(a)
        if type(a).__module__ == "numpy":
            return self.create_arg(_number(a))
        if isinstance(a, range):
            return list(a)
        if isinstance(a, torch.Generator):
            raise self.refusal("a torch.Generator draws random numbers", instead_of("randn"))
        return super().create_arg(dtype_meant(a))

    def refusal(self, what: str, instead: str) -> UntraceableLoss:
        """Return an error to raise, and keep it: a function that catches it goes another way."""
        self.refused.append(untraceable(what, instead))
        return self.refused[-1]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Tell whether a real tensor is already part of the graph."""
        return id(tensor) in self._nodes

    def _admit(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        if kind == "call_method":
            if target not in allow_list.METHODS:
                raise self.refusal(f"the method .{target}() is not allowed", instead_of(target))
        elif targets.name_of(target) is None:
            name = getattr(target, "__name__", repr(target))
            raise self.refusal(f"the function {name} is not allowed", instead_of(name))
        elif target is getattr and args[1] not in allow_list.ATTRIBUTES and not self.structured:
            raise self.refusal(f"the attribute .{args[1]} is not allowed", instead_of(args[1]))
        for name in allow_list.FORBIDDEN_KEYWORDS:
            if name in kwargs or argument(name, targets.name_of(target), args, {}) is not None:
                raise self.refusal(f"the argument {name}= is not allowed", "leave it out")
        for name in allow_list.ZERO_KEYWORDS:
            if not is_zero(argument(name, targets.name_of(target), args, kwargs)):
                raise self.refusal(f"the argument {name}= is not 0", instead_of("dropout"))

    def _record_grad_mode(self) -> None:
        """Record what torch.no_grad() did since the last node; other modes are refused."""
        if torch.is_inference_mode_enabled() or _autocast_state() != self._autocast:
            raise self.refusal(
                "autocast or inference mode is switched inside the function",
                "convert with .float() or .to(dtype), and use torch.no_grad()",
            )
        if torch.is_grad_enabled() != self._grad_enabled:
            self._grad_enabled = not self._grad_enabled
            self.graph.call_function(torch.set_grad_enabled, (self._grad_enabled,))

    def _tensor(self, tensor: torch.Tensor) -> Node:
        node = self._nodes.get(id(tensor))
        if node is None:
            name = self._name(tensor)
            node = self._nodes[id(tensor)] = self.graph.create_node("get_attr", name, (), {})
        return node

    def _name(self, tensor: torch.Tensor) -> str:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            raise self.refusal("a tensor of the function is not dense", "use .to_dense()")
        known = self._names.get(id(tensor))
        if tensor.requires_grad:
            if known is None:
                raise self.refusal(*foreign(tensor))
            if tensor._backward_hooks:
                raise self.refusal(f"the parameter {known} has a hook", HOOKED)
            self.parameters[known] = tensor
            return known
        buffer = self._buffers.get(id(tensor))
        if buffer is not None:
            self.buffers[buffer] = tensor
            return buffer
        taken = {*self.constants, *self._names.values(), *self._buffers.values()}
        name = next(
            name
            for index in count(len(self.constants))
            if (name := f"constant_{index}") not in taken
        )
        self.constants[name] = tensor
        return name


# Not operations: what torch.no_grad() calls, and a value that `encode` writes down.
_SURROUNDINGS: Final = (torch._C._set_grad_enabled, torch.device)

# Answered for real tensors; symbols have nodes for them.
_METADATA: Final = frozenset(
    """
    __dir__ __format__ __hash__ __len__ __repr__ dim element_size get_device is_complex
    is_contiguous is_floating_point is_tensor ndimension nelement numel size stride
    """.split()
)
_READS: Final = frozenset(
    "__array__ __bool__ __contains__ __float__ __index__ __int__ __iter__ item numpy tolist".split()
)
_MAKES: Final = frozenset("as_tensor asarray from_numpy tensor".split())


class Recorder(TorchFunctionMode):
    """While it is active every call into torch becomes a node.

    Args:
        formulas: by function, what records a call of it instead.
    """

    def __init__(self, recording: Recording, formulas: Mapping[Any, Any]) -> None:
        super().__init__()
        self._recording = recording
        self._formulas = formulas

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if func in _SURROUNDINGS:
            return func(*args, **kwargs)
        if name in ("__get__", "__set__"):
            return self._property(func, name, args)
        if drops_nothing(func, args, kwargs):
            return args[0] if args else kwargs["input"]
        if func in self._formulas:
            with self:
                return self._formulas[func](*args, **kwargs)
        if not _has_symbol((args, kwargs)):
            if name in _METADATA:
                return func(*args, **kwargs)
            if name in _READS or name in _MAKES:
                return self._read(func, name, args, kwargs)
        if name in _MAKES and not _has_symbol(args):
            return self._constant(func, args, kwargs)
        kwargs = with_default_dtype(name, args, kwargs)
        if is_method(func):
            return self._recording.create_proxy("call_method", name, args, kwargs)
        return self._recording.create_proxy("call_function", func, args, kwargs)

    def _property(self, func: Any, kind: str, args: tuple[Any, ...]) -> Any:
        name = func.__self__.__name__
        if kind == "__get__" and name == "data":
            return self._recording.create_proxy("call_method", "detach", args, {})
        if kind == "__get__" and name in VIEWS:
            return self._recording.create_proxy("call_function", getattr, (args[0], name), {})
        if kind == "__set__" or name == "grad":
            raise self._recording.refusal(
                f"the attribute .{name} is not recorded", instead_of("data")
            )
        return func(*args)

    def _constant(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Proxy:
        """Make a constant whose dtype or device is that of another tensor of the graph."""
        self._check_known(func.__name__, args)
        later = {name: value for name, value in kwargs.items() if isinstance(value, Proxy)}
        now = {name: value for name, value in kwargs.items() if name not in later}
        value = func(*args, **now)
        if "dtype" in later and (value.is_floating_point() or value.is_complex()):
            # Rounded once, to the dtype that it gets.
            value = func(*args, **now, dtype=torch.promote_types(value.dtype, torch.float64))
        if value.is_complex():  # safetensors holds none of 128 bits
            parts = (value.real.clone(), value.imag.clone())
            value = self._recording.create_proxy("call_function", torch.complex, parts, {})
        return self._recording.create_proxy("call_method", "to", (value,), later)

    def _read(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Read the value of a tensor that is known now: a closure tensor or a buffer."""
        self._check_known(name, args)
        return func(*args, **kwargs)

    def _check_known(self, name: str, args: tuple[Any, ...]) -> None:
        for tensor in args:
            if isinstance(tensor, torch.Tensor) and (
                tensor.requires_grad or (self._recording.writes and self._recording.holds(tensor))
            ):
                raise self._recording.refusal(
                    f"{name} reads a tensor that has a gradient or was written to",
                    instead_of("item"),
                )


def _number(value: Any) -> Any:
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    raise untraceable(
        "a NumPy array meets a tensor",
        f"convert it outside the function with torch.from_numpy; {ON_YOUR_SIDE}",
    )


def _autocast_state() -> tuple[bool, ...]:
    return tuple(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))


def _has_symbol(value: Any) -> bool:
    if isinstance(value, Proxy):
        return True
    if isinstance(value, list | tuple):
        return any(_has_symbol(item) for item in value)
    if isinstance(value, dict):
        return any(_has_symbol(item) for item in value.values())
    return isinstance(value, slice) and _has_symbol((value.start, value.stop, value.step))
