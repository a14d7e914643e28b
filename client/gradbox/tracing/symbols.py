"""What a function sees in place of its tensors while it is traced.

A `Symbol` is a torch.fx Proxy, which records operators and methods. It also records item
assignment, in-place operators and what a function takes for granted: a check, and a length. Every
other attempt to look at a value is answered with an error that says what to write instead.
"""

from __future__ import annotations

import dis
import operator
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final, NoReturn

import torch
from torch.fx import Node, Proxy

from gradbox.graphs import allow_list, targets
from gradbox.tracing.bytecode import passing_truth, unpacked
from gradbox.tracing.node_facts import is_form, num_entries, num_pieces
from gradbox.tracing.refusals import (
    CONTROL_FLOW,
    FORM,
    LOOP,
    NO_NUMBER,
    ON_YOUR_SIDE,
    OUTSIDE,
    PRINTED,
    SIZE,
)
from gradbox.tracing.source_location import brief_location, is_user_code, untraceable

# What a value of a graph may be asked for; `hasattr` says no to all else, as it does of a tensor.
_PUBLIC: Final = allow_list.ATTRIBUTES.union(
    *map(dir, (torch.Tensor, torch.Size, torch.device, torch.dtype, torch.finfo, torch.iinfo))
)

# Attributes that are views: whether gradients flow through one is settled where it is read.
VIEWS: Final = frozenset("H T imag mH mT real".split())

# What is so of every tensor while a function is traced. On the box any device is the job's.
_OF_EVERY_TENSOR: Final = {
    "device": torch.device("cpu"),
    "is_cpu": True,
    "is_cuda": False,
    "is_meta": False,
    "is_mkldnn": False,
    "is_mps": False,
    "is_nested": False,
    "is_quantized": False,
    "is_sparse": False,
    "is_sparse_csr": False,
    "layout": torch.strided,
}

_LENGTH: Final = targets.FUNCTIONS[allow_list.LENGTH]  # `len` itself is replaced meanwhile
_MATCH_CLASS: Final = dis.opmap["MATCH_CLASS"]
_LOAD_ATTR: Final = dis.opmap["LOAD_ATTR"]


class Symbol(Proxy):
    """A tensor, size or number that has no value yet.

    Its methods in this order: attributes, what is recorded, what is refused.
    """

    tracer: Any  # a Recording

    # NumPy hands an operation with a symbol back to the symbol.
    __array_ufunc__ = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not (self.tracer.structured or name in _PUBLIC):
            raise AttributeError(f"a tensor has no attribute {name!r}")
        if name in _OF_EVERY_TENSOR and not self.tracer.structured:
            return _OF_EVERY_TENSOR[name]
        if name == "data" and not self.tracer.structured:
            return self.detach()
        return SymbolAttribute(self, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The type, but not for those who would take another way for a tensor.

        They are `case torch.Tensor():`, `z.__class__ is torch.Tensor`, functools.singledispatch.
        """
        frame = sys._getframe(1)
        opcode = frame.f_code.co_code[frame.f_lasti] if frame.f_lasti >= 0 else None
        if opcode == _MATCH_CLASS:
            raise self.tracer.refusal(
                "`match` asks for the type of a value that is not known yet", OUTSIDE
            )
        if opcode == _LOAD_ATTR and _asked_by_user(frame):
            raise self.tracer.refusal("the type of a value is asked for", OUTSIDE)
        return type(self)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._record(operator.setitem, index, value)

    def __bool__(self) -> bool:
        asked_by = sys._getframe(1)
        passing = passing_truth(asked_by, of_equality=self.node.target is operator.eq)
        if passing is None:
            if is_form(self.node):
                raise self.tracer.refusal("Python control flow depends on a tensor's form", FORM)
            raise self.tracer.refusal("Python control flow depends on a value", CONTROL_FLOW)
        holds = self if passing else operator.eq(self, False)
        self._assert(holds, f"a check of the loss does not hold ({brief_location(asked_by)})")
        return passing

    def __iter__(self) -> Iterator[Any]:
        asked_by = sys._getframe(1)
        num = unpacked(asked_by) or num_entries(self.node)
        if num is None:
            if is_form(self.node):
                raise self.tracer.refusal("a size of unknown length is unpacked", SIZE)
            raise self.tracer.refusal("a loop runs over a tensor", LOOP)
        self._assert_length(num, asked_by)
        return iter([operator.getitem(self, index) for index in range(num)])

    def _assert_length(self, length: int, asked_by: FrameType) -> None:
        message = f"{length} entries were expected of a value ({brief_location(asked_by)})"
        self._assert(operator.eq(self._record(_LENGTH), length), message)

    def _assert(self, holds: Any, message: str) -> None:
        self.tracer.create_proxy("call_function", torch._assert, (holds, message), {})

    def _record(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, *args), {})

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("tracer", "node", "root", "attr", "_node"):
            super().__setattr__(name, value)
            return
        raise self.tracer.refusal(
            f"setting .{name} is not recorded", "use a method such as copy_ instead"
        )

    def __len__(self) -> int:
        num = num_entries(self.node)
        if num is None:
            raise self.tracer.refusal("len() of a tensor is not known yet", "use z.shape[0]")
        return num

    def __contains__(self, item: Any) -> bool:
        raise self.tracer.refusal("`in` looks at the values of a tensor", "use torch.isin")

    def __hash__(self) -> int:
        if _asked_by_user(sys._getframe(1)):
            what = "a set or a dict looks up a value that is not known yet"
            raise self.tracer.refusal(what, OUTSIDE)
        return id(self)

    def __str__(self) -> str:
        if _asked_by_user(sys._getframe(1)):
            raise untraceable(*PRINTED)
        return repr(self)

    def __format__(self, spec: str) -> str:
        if _asked_by_user(sys._getframe(1)):
            raise untraceable(*PRINTED)
        return format(repr(self), spec)

    def __float__(self) -> NoReturn:
        raise self.tracer.refusal("a Python number is needed here", NO_NUMBER)

    __int__ = __complex__ = __float__

    def __copy__(self, memo: Any = None) -> NoReturn:
        raise self.tracer.refusal("the copy module does not know this value yet", "use .clone()")

    __deepcopy__ = __copy__

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self.tracer.refusal(
            "a tensor becomes a NumPy array, for NumPy, SciPy or scikit-learn",
            f"use the torch function instead; {ON_YOUR_SIDE}",
        )


def _asked_by_user(frame: FrameType) -> bool:
    return is_user_code(frame.f_code.co_filename)


def length_of(symbol: Symbol) -> Any:
    """Stand for `len` in the traced function: the pieces of a tensor are as many as asked for."""
    num = num_pieces(symbol.node)
    if num is None:
        return symbol._record(_LENGTH)
    symbol._assert_length(num, sys._getframe(2))
    return num


class SymbolAttribute(Symbol):
    """An attribute that was read: a node of its own when used, a method call when called.

    A view is a node at once: `z.T` taken under `torch.no_grad()` stays without a gradient, and one
    taken before keeps its own.
    """

    def __init__(self, root: Symbol, attr: str) -> None:
        self.root = root
        self.attr = attr
        self.tracer = root.tracer
        self._node: Node | None = None
        if attr in VIEWS:
            self._node = self.node

    @property
    def node(self) -> Node:  # type: ignore[override]
        if self._node is None:
            proxy = self.tracer.create_proxy("call_function", getattr, (self.root, self.attr), {})
            self._node = proxy.node
        return self._node

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.attr == "new_tensor":
            kwargs = {name: value for name, value in kwargs.items() if value is not None}
            return torch.tensor(*args, **{"dtype": self.root.dtype, **kwargs})
        if self.attr != "numel" and is_form(self.root.node):
            raise self.tracer.refusal(f"a size or a number has no .{self.attr}()", SIZE)
        result: Proxy = self.tracer.create_proxy(
            "call_method", self.attr, (self.root, *args), kwargs
        )
        return result


def _define_in_place(name: str) -> None:
    function = getattr(operator, name)

    def record(self: Symbol, other: Any) -> Any:
        return self._record(function, other)

    record.__name__ = f"__{name}__"
    setattr(Symbol, record.__name__, record)


for _name in """
    iadd iand ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor
""".split():
    _define_in_place(_name)
