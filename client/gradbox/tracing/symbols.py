"""What a function sees in place of its tensors while it is traced.

A `Symbol` is a torch.fx Proxy that also records item assignment, in-place operators and
assertions, and that answers every attempt to look at a value with an error that says what to write
instead.
"""

from __future__ import annotations

import dis
import operator
import sys
from collections.abc import Iterator
from typing import Any, Final, NoReturn

import torch
from torch.fx import Node, Proxy

from gradbox.graphs import allow_list, targets
from gradbox.tracing.bytecode import passing_truth, unpacked
from gradbox.tracing.refusals import ON_YOUR_SIDE
from gradbox.tracing.source_location import brief_location, is_user_code, untraceable

NO_NUMBER: Final = (
    "sizes and tensors have no value while the function is traced, so int(), float() and range() "
    "of them cannot be recorded: use //, torch.arange, torch.clamp or math functions called as "
    f"math.sqrt(...) or math.trunc(...); {ON_YOUR_SIDE}"
)
_CONTROL_FLOW = (
    "write it with torch.where, a mask or torch.clamp; a choice that does not depend on tensors "
    f"can be an argument with a Python value; {ON_YOUR_SIDE}"
)

_FORM = (
    "ranks, sizes and dtypes are not known while the function is traced: leave the way that your "
    f"tensors take, or choose by an argument with a Python value; {ON_YOUR_SIDE}"
)
_SIZE = "write z.shape itself, z.shape.numel() for the product, or as many names as there are"
_KNOWN = f"decide outside the function, or by an argument with a Python value; {ON_YOUR_SIDE}"
_TEXT = "the text of a value is asked for that is not known yet"
_NO_TEXT = (
    'leave print() out (returns=("grads", "outputs") brings z back), or decide outside the '
    f"function; {ON_YOUR_SIDE}"
)
_LENGTH: Final = targets.FUNCTIONS[allow_list.LENGTH]  # `len` itself is replaced meanwhile
_MATCH_CLASS = dis.opmap["MATCH_CLASS"]
_LOAD_ATTR = dis.opmap["LOAD_ATTR"]
# What a value of a graph may be asked for; `hasattr` says no to all else, as it does of a tensor.
_PUBLIC: Final = allow_list.ATTRIBUTES.union(
    *map(dir, (torch.Tensor, torch.Size, torch.device, torch.dtype, torch.finfo, torch.iinfo))
)

# Attributes that are views: whether gradients flow through one is settled where it is read.
VIEWS: Final = frozenset("H T imag mH mT real".split())

# What of a tensor is its form. Its device is known.
_FORMS: Final = frozenset(
    (
        *"dim dtype is_complex is_floating_point ndim ndimension nelement numel shape size".split(),
        _LENGTH,
    )
)

# How torch names the number of pieces, or their sizes, that it is to cut a tensor into.
_PIECES: Final = frozenset(
    "chunks indices sections split_size split_size_or_sections split_sizes".split()
)
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


class Symbol(Proxy):
    """A tensor, size or number that has no value yet."""

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
        asked_by = frame.f_code.co_code[frame.f_lasti] if frame.f_lasti >= 0 else None
        if asked_by == _MATCH_CLASS:
            raise self.tracer.refusal(
                "`match` asks for the type of a value that is not known yet", _KNOWN
            )
        if asked_by == _LOAD_ATTR and is_user_code(frame.f_code.co_filename):
            raise self.tracer.refusal("the type of a value is asked for", _KNOWN)
        return type(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("tracer", "node", "root", "attr", "_node"):
            super().__setattr__(name, value)
            return
        raise self.tracer.refusal(
            f"setting .{name} is not recorded", "use a method such as copy_ instead"
        )

    def __bool__(self) -> bool:
        caller = sys._getframe(1)
        passing = passing_truth(caller, of_equality=self.node.target is operator.eq)
        if passing is not None:
            holds = self if passing else operator.eq(self, False)
            message = f"a check of the loss does not hold ({brief_location(caller)})"
            self.tracer.create_proxy("call_function", torch._assert, (holds, message), {})
            return passing
        if _is_form(self.node):
            raise self.tracer.refusal("Python control flow depends on a tensor's form", _FORM)
        raise self.tracer.refusal("Python control flow depends on a value", _CONTROL_FLOW)

    def __iter__(self) -> Iterator[Proxy]:
        num_targets = unpacked(sys._getframe(1)) or _num_entries(self.node)
        if num_targets is None and _is_form(self.node):
            raise self.tracer.refusal("a size of unknown length is unpacked", _SIZE)
        if num_targets is None:
            raise self.tracer.refusal(
                "a loop runs over a tensor",
                "write it with batched operations, unpack into as many names as there are entries, "
                f"or take pieces by chunk(n); {ON_YOUR_SIDE}",
            )
        self._check_length(num_targets, brief_location(sys._getframe(1)))
        return iter([operator.getitem(self, index) for index in range(num_targets)])

    def _check_length(self, length: int, where: str) -> None:
        """Record that the value has that many entries, as Python makes sure of when it unpacks."""
        found = self.tracer.create_proxy("call_function", _LENGTH, (self,), {})
        message = f"{length} entries were expected of a value ({where})"
        equal = self.tracer.create_proxy("call_function", operator.eq, (found, length), {})
        self.tracer.create_proxy("call_function", torch._assert, (equal, message), {})

    def __len__(self) -> int:
        num_pieces = _num_entries(self.node)
        if num_pieces is not None:
            return num_pieces
        raise self.tracer.refusal("len() of a tensor is not known yet", "use z.shape[0]")

    def __contains__(self, item: Any) -> bool:
        raise self.tracer.refusal("`in` looks at the values of a tensor", "use torch.isin")

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    def __hash__(self) -> int:
        if is_user_code(sys._getframe(1).f_code.co_filename):
            raise self.tracer.refusal(
                "a set or a dict looks up a value that is not known yet", _KNOWN
            )
        return id(self)

    def __str__(self) -> str:
        if is_user_code(sys._getframe(1).f_code.co_filename):
            raise untraceable(_TEXT, _NO_TEXT)
        return repr(self)

    def __format__(self, spec: str) -> str:
        if is_user_code(sys._getframe(1).f_code.co_filename):
            raise untraceable(_TEXT, _NO_TEXT)
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


def length_of(value: Symbol) -> Any:
    """Record how many entries a value has; of a tensor's pieces return how many were asked for."""
    num = _num_pieces(value.node)
    if num is None:
        return value.tracer.create_proxy("call_function", _LENGTH, (value,), {})
    value._check_length(num, brief_location(sys._getframe(2)))
    return num


def _num_entries(node: Node) -> int | None:
    """Return how many entries a node asks for, as pieces or by a slice; None if it does not say."""
    if node.target is operator.getitem and isinstance(node.args[1], slice):
        return _num_sliced(node.args[1])
    return _num_pieces(node)


def _num_pieces(node: Node) -> int | None:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    named = (value for key, value in node.kwargs.items() if key in _PIECES)
    asked = node.args[1] if len(node.args) > 1 else next(named, None)
    if isinstance(asked, int):
        return asked if name in ("chunk", "tensor_split") else None
    if name in ("split", "split_with_sizes", "tensor_split") and isinstance(asked, list | tuple):
        return len(asked) + (name == "tensor_split")
    return None


def _is_form(node: Node) -> bool:
    """Tell whether a value is made of tensors' ranks, sizes and dtypes alone."""
    asked = node.args[1] if node.target is getattr else node.target
    if asked in _FORMS:
        return True
    of_python = getattr(node.target, "__module__", None) in ("_operator", "builtins", "math")
    return of_python and node.target is not getattr and all(map(_is_form, node.all_input_nodes))


def _num_sliced(asked: slice) -> int | None:
    """Return how many entries `value[-4:]` or `value[1:5]` has where the value has enough."""
    start, stop = asked.start or 0, asked.stop
    if asked.step is not None or not isinstance(start, int):
        return None
    if stop is None:
        return -start if start < 0 else None
    return max(stop - start, 0) if isinstance(stop, int) and (start < 0) == (stop < 0) else None


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
        if self.attr != "numel" and _is_form(self.root.node):
            raise self.tracer.refusal(f"a size or a number has no .{self.attr}()", _SIZE)
        result: Proxy = self.tracer.create_proxy(
            "call_method", self.attr, (self.root, *args), kwargs
        )
        return result


def _define_in_place(name: str) -> None:
    target = getattr(operator, name)

    def record(self: Symbol, other: Any) -> Proxy:
        written: Proxy = self.tracer.create_proxy("call_function", target, (self, other), {})
        return written

    record.__name__ = f"__{name}__"
    setattr(Symbol, record.__name__, record)


for _name in """
    iadd iand ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor
""".split():
    _define_in_place(_name)
