"""Embedding tables, of whose gradient a shard has a few rows.

torch's gradient of a table of 30,000 rows is zeros but for the some hundred rows that a shard
looked up: a tensor as large as the table for each shard, filled in, added to the sum as a whole,
and thrown away. An `nn.Embedding` that is told to be sparse gives those rows alone, and the sum,
which stays dense, takes them where they belong. On MiniLM (30,522 × 384, one thread) that saves 4
of a small shard's 123 ms. Where the peak is at the end of a backward pass, as with small shards, it
saves memory up to that of a second table; where it is at the beginning, none.

The rows of one shard join the sum one by one, where a dense gradient would add them up first. So
the result may differ from that in the last bits; it does not depend on what is kept.

Left as they are: tables under a million entries, which gain little; those whose gradient is divided
by how often a row came, for which torch has none by rows; those on whose gradient somebody has hung
a hook; those with a sum wider than they are; and other devices than a CPU, where that is not
measured.

A model that uses the table's own gradient in its forward pass, by operations that torch lacks for
gradients by rows (`norm`, `mean`, slicing, `torch.func.vmap`), fails with them. Its job begins
again with dense ones, and if it succeeds, the model keeps to them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from weakref import WeakSet

import torch
from torch import Tensor, nn

from gradbox_engine.model.precision import accumulation_dtype

MANY_ENTRIES = 1 << 20

_dense: WeakSet[nn.Module] = WeakSet()


def gather_rows(model: nn.Module, differentiated: Collection[nn.Parameter]) -> None:
    """Have large tables among these parameters give gradients by rows, until the model is restored.

    `preservation.preserved` puts the flag back.
    """
    wanted = {id(parameter) for parameter in differentiated if _bears_rows(parameter)}
    if not wanted or model in _dense:
        return
    for table in _tables(model):
        if id(table._parameters.get("weight")) in wanted:
            table.sparse = True


def gives_rows(model: nn.Module) -> bool:
    """Return whether jobs on a model may have gradients by rows."""
    return model not in _dense and any(map(_bears_rows, (table.weight for table in _tables(model))))


@contextmanager
def dense_tables(model: nn.Module) -> Iterator[None]:
    """Have all tables of a model give dense gradients; from here on, if nothing is raised."""
    _dense.add(model)
    try:
        yield
    except BaseException:
        _dense.discard(model)
        raise


def _tables(model: nn.Module) -> Iterator[nn.Embedding]:
    for module in model.modules():
        if isinstance(module, nn.Embedding) and not module.scale_grad_by_freq:
            yield module


def _bears_rows(parameter: Tensor) -> bool:
    return (
        parameter.numel() >= MANY_ENTRIES
        and parameter.device.type == "cpu"
        and parameter.layout is torch.strided
        and accumulation_dtype(parameter.dtype) == parameter.dtype
        and not parameter._backward_hooks
        and not parameter._post_accumulate_grad_hooks
    )
