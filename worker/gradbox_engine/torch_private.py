"""All names that the engine uses and torch calls private, each with what becomes of us without it.

torch may change them in any version. Each is in 2.11, the oldest that we support and that
`make test-oldest` runs, and in 2.13, but for those that say otherwise. Where torch gets a public
name for the same, the private one goes. `tests/house` looks for private names in all other files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors
from torch.autograd.graph import Node
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "SAVED_INPUTS",
    "BatchNorm",
    "TorchDispatchMode",
    "base_of",
    "batched_gradients",
    "buffers_of",
    "copy_each",
    "flattened",
    "function_mode_enabled",
    "has_dead_end",
    "hooks_after_accumulation",
    "hooks_on_calls",
    "hooks_on_gradient",
    "inside_transform",
    "is_traceable_wrapper_subclass",
    "looked_up",
    "nodes_behind",
    "num_holders",
    "of_a_transform",
    "parameters_of",
    "same_memory",
    "saved_tensor_hooks",
    "set_versions",
    "sparse_parts",
    "switch_gradients",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "version_of",
    "without_numbers",
]

# Version counters: a graph refuses a tensor that was overwritten since it saved it.


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written to.

    Without it, an overwritten tensor could be told by its numbers alone.
    """
    return tensor._version


def set_versions(tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
    """Let graphs that saved tensors find the versions that they saved, once numbers are restored.

    torch's own FSDP uses it for the same purpose. Without it, no graph of a model with buffers that
    shards change could be kept: all shards would be replayed.
    """
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


# Hooks: there is no public way to list or remove those that another registered.


def hooks_on_gradient(tensor: Tensor) -> MutableMapping[int, Any] | None:
    """Return the live dict of `register_hook`, None where there never was one.

    Without it, hooks that a forward pass registers on parameters would pile up unnoticed, and a
    penalty's gradient would not pass through hooks of the model's own.
    """
    return tensor._backward_hooks


def hooks_on_calls(module: nn.Module) -> list[Any]:
    """Return a module's hooks before and after its calls.

    Without it, plans of rows would outlive a hook that the user of a live module registers.
    """
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def hooks_after_accumulation(tensor: Tensor) -> MutableMapping[int, Any] | None:
    """Return the live dict of `register_post_accumulate_grad_hook`, likewise.

    Without it, every gradient would be summed by a hook, with a copy.
    """
    return tensor._post_accumulate_grad_hooks


# Modules: the tables themselves, for what is bound to a name is read and put back in place.


def buffers_of(module: nn.Module) -> MutableMapping[str, Tensor | None]:
    """Return the live table of a module's own buffers; `named_buffers` leaves out what is None."""
    return module._buffers


def parameters_of(module: nn.Module) -> Mapping[str, Tensor | None]:
    """Return the live table of a module's own parameters."""
    return module._parameters


# torch's base class of all batch norms, by which it tells them itself. Without it, those of a class
# that another library derives from it would be refused over several devices.
BatchNorm: Final = _BatchNorm

# Tensors.


def base_of(tensor: Tensor) -> Tensor | None:
    """Return what a tensor is a view of, with its graph.

    Without it, parameters of which a model makes views would have rows by a loop.
    """
    return tensor._base


def sparse_parts(tensor: Tensor) -> list[Tensor]:
    """Return indices and values of a COO tensor, also of one that is not coalesced.

    The public `indices` and `values` refuse that one.
    """
    return [tensor._indices(), tensor._values()]


def without_numbers(tensor: Tensor) -> bool:
    """Return whether forward mode made a tensor that is zero and has no storage.

    Without it, its storage would be asked for, which raises.
    """
    return tensor._is_zerotensor()


def num_holders(storage: torch.UntypedStorage) -> int | None:
    """Return how many hold a storage; None where this torch does not say: then all are copied."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return None if count is None else count(storage._cdata)


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """Return the numbers of dense tensors in one flat tensor, by one kernel; one alone as a view.

    `torch.cat` of flat views does the same, slower.
    """
    flat: Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return flat


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors into others, all by one call; `copy_` in a loop does the same, slower."""
    torch._foreach_copy_(list(targets), list(sources))


def same_memory(tensor: Tensor) -> Tensor:
    """Return a tensor of the same memory that is no view to autograd.

    Without it, rows of a tensor that its model overwrites later would be made by a loop.
    """
    found: Tensor = torch.ops.aten._unsafe_view(tensor, tensor.shape)
    return found


# `TorchDispatchMode`, `is_traceable_wrapper_subclass` and the `tree_…` functions stand in modules
# with private names, and torch's own guides import them from there. Of trees, optree would do.

# Graphs, modes and transforms.


def switch_gradients(enabled: bool) -> None:
    """Switch gradients on or off from here on, as the call does that a traced graph holds.

    Without it, loss functions that switch them would be refused.
    """
    torch._C._set_grad_enabled(enabled)


def nodes_behind(*tensors: Tensor) -> Iterator[Node]:
    """Give the nodes of the graph behind some tensors, each once."""
    pending, seen = [tensor.grad_fn for tensor in tensors], set()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            pending += [following for following, _ in node.next_functions]


def has_dead_end(*tensors: Tensor) -> bool:
    """Return whether the graph behind some tensors has a node that only raises, known by its name.

    autograd does not run such a node where it has nothing to hand on to: the derivative would be
    zero without an error.
    """
    return any(node.name() == "torch::autograd::Error" for node in nodes_behind(*tensors))


def inside_transform() -> bool:
    """Return whether a `torch.func` transform is running, whose tensors have graphs of their own.

    Without it, models that use `torch.func` would have to be refused for rows and tangents.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def of_a_transform(tensor: Tensor) -> bool:
    """Return whether a tensor belongs to a transform; of one that is over, it cannot be read."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def batched_gradients(
    value: Tensor, wanted: Sequence[Any], cotangents: Tensor, *, keep_graph: bool
) -> list[Tensor | None]:
    """Return the gradients at edges or leaves for Y cotangents in one backward pass, (Y, ...) each.

    `torch.autograd.grad(is_grads_batched=True)` does the same; what it does beside takes longer
    than the pass of a small model.
    """
    level = torch._C._vmapmode_increment_nesting()
    try:
        batched = torch._add_batch_dim(cotangents, 0, level)
        found = torch.autograd.grad(value, wanted, batched, keep_graph, allow_unused=True)
        return [
            None if g is None else torch._remove_batch_dim(g, level, len(cotangents), 0)
            for g in found
        ]
    finally:
        torch._C._vmapmode_decrement_nesting()


def function_mode_enabled() -> bool:
    """Return whether any function mode is; without it, calls of custom Functions stay unseen."""
    return torch._C._is_torch_function_mode_enabled()


def saved_tensor_hooks() -> object | None:
    """Return the hooks on saved tensors that are in force, as in a checkpointed block.

    Without it, a model's own checkpoints around blocks that are recomputed would go wrong, and rows
    of checkpointed blocks would be made by a loop.
    """
    hooks: object | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def looked_up(node: Any) -> tuple[Tensor, int]:
    """Return the ids and the padding index that an embedding's node has saved.

    Without it, rows of a derived table would be made by a loop.
    """
    return node._saved_indices, node._saved_padding_idx


# `torch.utils.checkpoint` saves inputs by this Function, in the versions that have it, 2.11 among
# them. It has no rule for forward mode; without the name, nothing needs to be replaced.
SAVED_INPUTS: Final = "_NoopSaveInputs"
