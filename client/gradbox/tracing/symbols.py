"""What Python asks of a symbol while a function is traced, and how we know the answer.

A `Symbol` stands for a tensor, a size or a number that has no value yet. It is a torch.fx Proxy, so
that operators, methods and torch functions of it become nodes. Python asks more of a value than
that. Each question has one of four answers: it is recorded, it is known from the graph, it is taken
for granted and checked on the box (an assertion in the graph), or it is refused with the user's
line and what to write instead.

    the code                            asks              is told
    ──────────────────────────────────  ────────────────  ──────────────────────────────────────────
    z.T, z.shape, z.values              __getattr__       a node, or what is so of every tensor
    z[i] = v, z += v                    __setitem__, …    a node
    assert t, if t: raise, if not t:    __bool__          the truth with which the check passes: the
    raise, each part of `or`                              bytecode shows which way only raises
    if t: … else: …                     __bool__          refused
    a, b = v                            __iter__          as many entries as names: UNPACK_SEQUENCE
    for piece in v.chunk(4), v[-2:]     __iter__          as many as the node asked for
    for row in z                        __iter__          refused
    len(v)                              `length_of`       a node; of pieces their number
    isinstance(v, torch.Tensor)         `type_test`       true of an argument, and of what a check
                                                          takes for one; else refused
    match v, v.__class__                __class__         refused; others see the type
    int(v), v in w, {v}, str(v), copy   its own           refused; torch's code may hash and print
    an array of it                      __array__         refused

What is taken for granted is asserted, so the box never computes by another way than the one that
was traced. A frame's bytecode is read for two questions alone, and what it does not show for
certain is refused: in `passing_truth` one of the two ways raises and the other does not, in
`unpacked` the next instruction names the count.
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


_PADDING: Final = frozenset({"CACHE", "NOP", "TO_BOOL", "NOT_TAKEN", "EXTENDED_ARG"})
_JUMPS: Final = frozenset({*dis.hasjrel, *dis.hasjabs})


def unpacked(frame: FrameType) -> int | None:
    """Return n where the frame runs `a_1, .., a_n = value`, None where it iterates otherwise."""
    at = next(_following(frame, frame.f_lasti), None)
    return at.argval if at is not None and at.opname == "UNPACK_SEQUENCE" else None


def passing_truth(
    frame: FrameType, *, called: bool = False, of_equality: bool = False
) -> bool | None:
    """Return the truth value with which a check passes, where the frame raises at the other one.

    Checks are `assert value`, `if not value: raise` and each part of `if value or other: raise`.

    Args:
        called: the frame has called what will return the truth value, and asks for none itself.
        of_equality: the value is that of `a == b`, which may be entries of sequences compared.

    Returns:
        None where neither or both of the two ways only raise.
    """
    following = _following(frame, frame.f_lasti)
    asking = next(following)
    # A comparison asks about entries of sequences, from 3.13 on about what it returns, too.
    before_jump = asking.opname == ("CALL" if called else "COMPARE_OP")
    jump = next(following, None) if before_jump else asking
    if jump is None or not jump.opname.startswith("POP_JUMP"):
        return None
    if not jump.opname.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    jumps_if = jump.opname.endswith("IF_TRUE")
    there, here = _only_raises(frame, jump.argval), _only_raises(frame, next(following).offset)
    passing = None if there == here else jumps_if != there
    if before_jump and of_equality and asking.argval != "==":
        return True if (asking.argval, passing) == ("!=", False) else None  # all are equal
    return passing


def _following(frame: FrameType, offset: int) -> Iterator[dis.Instruction]:
    """Yield the instructions of a frame's code from an offset on, without padding."""
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset >= offset and instruction.opname not in _PADDING:
            yield instruction


def _only_raises(frame: FrameType, offset: int) -> bool:
    for instruction in _following(frame, offset):
        if instruction.opname == "RAISE_VARARGS":
            return True
        if instruction.opname == "JUMP_FORWARD":  # to where `a < b < c` is not so
            return _only_raises(frame, instruction.argval)
        if instruction.opcode in _JUMPS or instruction.opname.startswith(("RETURN", "YIELD")):
            return False
    return False


# What of a tensor is its form. Its device is known.
_FORMS: Final = frozenset(
    (
        *"dim dtype is_complex is_floating_point ndim ndimension nelement numel shape size".split(),
        targets.FUNCTIONS[allow_list.LENGTH],
    )
)
# How torch names the number of pieces, or their sizes, that it is to cut a tensor into.
_PIECES: Final = frozenset(
    "chunks indices sections split_size split_size_or_sections split_sizes".split()
)


def is_form(node: Node) -> bool:
    """Tell whether a value is made of tensors' ranks, sizes and dtypes alone."""
    asked = node.args[1] if node.target is getattr else node.target
    if asked in _FORMS:
        return True
    of_python = getattr(node.target, "__module__", None) in ("_operator", "builtins", "math")
    return of_python and node.target is not getattr and all(map(is_form, node.all_input_nodes))


def num_entries(node: Node) -> int | None:
    """Return how many entries a node asks for, as pieces or by a slice; None if it does not say."""
    if node.target is operator.getitem and isinstance(node.args[1], slice):
        return _num_sliced(node.args[1])
    return num_pieces(node)


def num_pieces(node: Node) -> int | None:
    """Return into how many pieces a node cuts a tensor; None if it does not say."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    named = (value for key, value in node.kwargs.items() if key in _PIECES)
    asked = node.args[1] if len(node.args) > 1 else next(named, None)
    if isinstance(asked, int):
        return asked if name in ("chunk", "tensor_split") else None
    if name in ("split", "split_with_sizes", "tensor_split") and isinstance(asked, list | tuple):
        return len(asked) + (name == "tensor_split")
    return None


def _num_sliced(asked: slice) -> int | None:
    """Return how many entries `value[-4:]` or `value[1:5]` has where the value has enough."""
    start, stop = asked.start or 0, asked.stop
    if asked.step is not None or not isinstance(start, int):
        return None
    if stop is None:
        return -start if start < 0 else None
    return max(stop - start, 0) if isinstance(stop, int) and (start < 0) == (stop < 0) else None
