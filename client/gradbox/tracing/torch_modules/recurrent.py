"""Recurrent layers, each as one call, and their cells, each as its formula.

A cell asks whether there is a batch dimension; its formula is the same with and without. H below is
the hidden size; the gates lie one after the other along the last dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

from gradbox.tracing.refusals import instead_of
from gradbox.tracing.source_location import untraceable
from gradbox.tracing.torch_modules.assertions import of_rank, record_assertion


def recurrent(module: nn.RNNBase, input: Any, hx: Any = None) -> tuple[Any, Any]:
    """Record nn.RNN, nn.GRU or nn.LSTM over a batch of sequences."""
    if module.training and module.dropout:
        raise untraceable(
            f"nn.{type(module).__name__} drops what goes from layer to layer in train mode",
            instead_of("dropout"),
        )
    of_rank(3)(module, input)
    if hx is None:
        rows = module.num_layers * (2 if module.bidirectional else 1)
        batch = input.size(0 if module.batch_first else 1)
        hx = input.new_zeros((rows, batch, module.proj_size or module.hidden_size))
        if module.mode == "LSTM":
            hx = (hx, input.new_zeros((rows, batch, module.hidden_size)))
    found: Any = _LAYERS[module.mode](
        input,
        hx,
        [getattr(module, name) for name in module._flat_weights_names],
        module.bias,
        module.num_layers,
        0.0,
        module.training,
        module.bidirectional,
        module.batch_first,
    )
    return found[0], (found[1], found[2]) if module.mode == "LSTM" else found[1]


def rnn_cell(module: nn.RNNCell, input: Any, hx: Any = None) -> Any:
    """Record h' = tanh(W x + b + U h + c), or relu of it."""
    of_input, of_state = _gates(module, input, hx)
    return (F.relu if module.nonlinearity == "relu" else torch.tanh)(of_input + of_state)


def gru_cell(module: nn.GRUCell, input: Any, hx: Any = None) -> Any:
    """Record h' = n + z (h - n), n = tanh(W x + b + r (U h + c)), with gates r and z."""
    of_input, of_state = _gates(module, input, hx)
    reset_x, update_x, new_x = of_input.chunk(3, -1)
    reset_h, update_h, new_h = of_state.chunk(3, -1)
    reset, update = torch.sigmoid(reset_x + reset_h), torch.sigmoid(update_x + update_h)
    new = torch.tanh(new_x + reset * new_h)
    return new - update * new if hx is None else new + update * (hx - new)


def lstm_cell(module: nn.LSTMCell, input: Any, hx: Any = None) -> tuple[Any, Any]:
    """Record c' = f c + i g and h' = o tanh(c'), with gates i, f, g and o."""
    of_input, of_state = _gates(module, input, None if hx is None else hx[0])
    i, f, g, o = (of_input + of_state).chunk(4, -1)
    state = torch.sigmoid(i) * torch.tanh(g)
    if hx is not None:
        hidden, cell = hx
        record_assertion(cell.shape == hidden.shape, "LSTMCell: expected two states of one shape")
        state = torch.sigmoid(f) * cell + state
    return torch.sigmoid(o) * torch.tanh(state), state


def _gates(module: nn.RNNCellBase, input: Any, hidden: Any) -> tuple[Any, Any]:
    """Return W x + b and U h + c, without a sum of the two; h is 0 where it is not given."""
    of_rank(1, 2)(module, input)
    of_input: Any = F.linear(input, module.weight_ih, module.bias_ih)
    if hidden is None:
        zeros = torch.zeros_like(of_input)[..., : module.hidden_size]
        return of_input, F.linear(zeros, module.weight_hh, module.bias_hh)
    of_state: Any = F.linear(hidden, module.weight_hh, module.bias_hh)
    message = f"{type(module).__name__}: expected a state for every row of the input"
    record_assertion(of_input.shape == of_state.shape, message)
    return of_input, of_state


_LAYERS: Final[dict[str, Callable[..., Any]]] = {
    "LSTM": torch.lstm,
    "GRU": torch.gru,
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
}
