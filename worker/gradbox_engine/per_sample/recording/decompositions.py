"""Layers that are one function to PyTorch, decomposed so that their calls can be recorded.

Multi-head attention is not rewritten: the same source runs, with its check for overrides answered
"no" so that the calls inside it reach the function mode. Recurrent layers, whose kernel contains
all steps, are written out in linear maps and pointwise functions; the arithmetic is the kernel's up
to rounding, and dropout between layers draws the same numbers.

A conversion to the dtype and device of another tensor is one to that dtype and device.

Not decomposed: packed sequences, whose rows hold several samples each (their parameters are
looped over).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

State = tuple[Tensor, ...]
Cell = Callable[[Tensor, State, Sequence[Tensor | None]], State]


def _inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of `torch.nn.functional` that does not dispatch itself to the mode."""
    if not isinstance(function, types.FunctionType):
        raise TypeError(f"expected a Python function, got {function!r}")
    silent = {
        name: lambda *_: False for name in function.__globals__ if name.startswith("has_torch_func")
    }
    inlined = types.FunctionType(
        function.__code__,
        {**function.__globals__, **silent},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    inlined.__kwdefaults__ = function.__kwdefaults__
    return inlined


def _lstm_step(gates: Tensor, state: State, weights: Sequence[Tensor | None]) -> State:
    h, c = state
    i, f, g, o = (gates + F.linear(h, _weight(weights[0]), weights[1])).chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return (F.linear(h, weights[2]) if weights[2] is not None else h), c


def _gru_step(gates: Tensor, state: State, weights: Sequence[Tensor | None]) -> State:
    (h,) = state
    r, z, n = gates.chunk(3, 1)
    hr, hz, hn = F.linear(h, _weight(weights[0]), weights[1]).chunk(3, 1)
    reset, update = torch.sigmoid(r + hr), torch.sigmoid(z + hz)
    new = torch.tanh(n + reset * hn)
    return (new + update * (h - new),)


def _plain_step(activation: Callable[[Tensor], Tensor]) -> Cell:
    def step(gates: Tensor, state: State, weights: Sequence[Tensor | None]) -> State:
        return (activation(gates + F.linear(state[0], _weight(weights[0]), weights[1])),)

    return step


def _weight(weight: Tensor | None) -> Tensor:
    if weight is None:
        raise TypeError("a recurrent layer needs its hidden-to-hidden weight, got None")
    return weight


def _recurrent(step: Cell, num_states: int) -> Callable[..., Any]:
    def run(
        input: Tensor,
        hx: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        states = tuple(hx) if num_states > 1 else (hx,)
        sequence = input.transpose(0, 1) if batch_first else input  # (T, B, D)
        directions = 2 if bidirectional else 1
        per_direction = len(params) // (num_layers * directions)
        last: list[State] = []
        for layer in range(num_layers):
            outputs = []
            for direction in range(directions):
                cell = layer * directions + direction
                weights = params[cell * per_direction : (cell + 1) * per_direction]
                state = tuple(part[cell] for part in states)
                output, state = _unrolled(step, sequence, state, weights, has_biases, direction)
                outputs.append(output)
                last.append(state)
            sequence = outputs[0] if directions == 1 else torch.cat(outputs, -1)
            if dropout and train and layer < num_layers - 1:
                sequence = F.dropout(sequence, dropout, True)
        output = sequence.transpose(0, 1) if batch_first else sequence
        return (output, *(torch.stack(parts) for parts in zip(*last, strict=True)))

    return run


def _unrolled(
    step: Cell,
    sequence: Tensor,
    state: State,
    weights: Sequence[Tensor],
    has_biases: bool,
    direction: int,
) -> tuple[Tensor, State]:
    """Run one direction of one layer over (T, B, D)."""
    biases = 2 if has_biases else 0
    projection = weights[2 + biases] if len(weights) > 2 + biases else None
    gates = F.linear(sequence, weights[0], weights[2] if has_biases else None)
    hidden = (weights[1], weights[3] if has_biases else None, projection)
    steps = gates.unbind(0)
    outputs = []
    for at in reversed(steps) if direction else steps:
        state = step(at, state, hidden)
        outputs.append(state[0])
    if direction:
        outputs.reverse()
    return torch.stack(outputs), state


def _cell(step: Cell, num_states: int) -> Callable[..., Any]:
    def run(
        input: Tensor,
        hx: Any,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Any:
        states = tuple(hx) if num_states > 1 else (hx,)
        state = step(F.linear(input, w_ih, b_ih), states, (w_hh, b_hh, None))
        return state if num_states > 1 else state[0]

    return run


def _like(x: Tensor, other: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x.to(other.device, other.dtype, *args, **kwargs)


_DECOMPOSITIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.multi_head_attention_forward: _inlined(F.multi_head_attention_forward),
    torch.lstm: _recurrent(_lstm_step, 2),
    torch.gru: _recurrent(_gru_step, 1),
    torch.rnn_tanh: _recurrent(_plain_step(torch.tanh), 1),
    torch.rnn_relu: _recurrent(_plain_step(torch.relu), 1),
    torch.lstm_cell: _cell(_lstm_step, 2),
    torch.gru_cell: _cell(_gru_step, 1),
    torch.rnn_tanh_cell: _cell(_plain_step(torch.tanh), 1),
    torch.rnn_relu_cell: _cell(_plain_step(torch.relu), 1),
}


def decomposed(function: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """Return what runs in place of `function`, None where it is called as it is."""
    if function in (Tensor.to, Tensor.type_as):
        return _like if len(args) > 1 and isinstance(args[1], Tensor) else None
    packed = len(args) > 1 and isinstance(args[1], Tensor) and args[1].dtype == torch.int64
    return None if packed else _DECOMPOSITIONS.get(function)
