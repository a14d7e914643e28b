"""What the code that asks a symbol for a value will do with it, read from its instructions."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import FrameType
from typing import Final

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
