"""Blocks of a model whose insides are computed again in the backward pass.

Of a shard that is recomputed, the graph is cut at the model's repeated blocks: of each only the
inputs stay in memory, and its insides are there once more while the backward pass is in it. The
graph and the kernels are those of a call without it, so gradients have the same bits on a CPU.

Cut by torch's checkpoint that is not reentrant. What it lacks is here: a block runs again under the
random numbers of every global generator, the attributes and the buffers that it began with, which
are put back behind it; and some entries of its outputs are compared with those of its first run.

Cost, with F and B a shard's forward and backward: one F more in each backward pass, about three
fifths of that with "blocks". Memory: the inputs of all blocks and the insides of one, or those of
the blocks that are left whole; and a copy of the buffers that a block changes.

Not cut: a block that runs without a graph, or inside a checkpoint of the model's own, which frees
its insides already. Not put back: what lies deeper in an attribute or an argument, as a cache that
goes from block to block: the block's second run then differs, and is refused.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradbox_engine.errors import BadInputs, EngineError, ReplayMismatch
from gradbox_engine.model.calling.blame import is_out_of_memory
from gradbox_engine.model.calling.outputs import Outputs
from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.model.comparison import ReplayComparison, sketch
from gradbox_engine.requests import Group, Precision, Recomputed
from gradbox_engine.torch_private import (
    buffers_of,
    saved_tensor_hooks,
    set_versions,
    tree_leaves,
    version_of,
)

NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)

LEFT_WHOLE = 0.4
"""The part of each list, its end, that "blocks" does not cut: the backward pass comes there first,
while nothing else was computed again, and is through when it needs room for that."""

Rerun = Callable[[], AbstractContextManager[object]]
"""Returns the context of a second run, in which random numbers are those of the first."""


def repeated_blocks(model: nn.Module, asked: str) -> dict[str, nn.Module]:
    """Return the modules whose insides may be computed again, the outermost ones, by name.

    Args:
        asked: "auto": children of a `ModuleList` or a `Sequential` that have modules in them, of a
            class that occurs more than once there; "blocks": these without the end of each list,
            see `LEFT_WHOLE`. Else a name or a shell pattern over names.
    """
    named = {name: module for name, module in model.named_modules() if name}
    callable_ones = [n for n, module in named.items() if not isinstance(module, NEVER_CALLED)]
    if asked in ("blocks", "auto"):
        found = _repeated(model)
    else:
        found = {asked} & named.keys() or {n for n in named if fnmatchcase(n, asked)}
    found.intersection_update(callable_ones)
    outermost = [
        name
        for name in callable_ones
        if name in found and not any(name.startswith(f"{outer}.") for outer in found)
    ]
    return {name: named[name] for name in (_begins(outermost) if asked == "blocks" else outermost)}


def _begins(names: Iterable[str]) -> Iterator[str]:
    """Return the first part of each list."""
    lists: dict[str, list[str]] = {}
    for name in names:
        lists.setdefault(name.rpartition(".")[0], []).append(name)
    for members in lists.values():
        yield from members[: len(members) - round(LEFT_WHOLE * len(members))]


def _repeated(model: nn.Module) -> set[str]:
    found = set()
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            inside = {n: child for n, child in module.named_children() if any(child.children())}
            kinds = Counter(map(type, inside.values()))
            prefix = f"{path}." if path else ""
            found |= {prefix + n for n, child in inside.items() if kinds[type(child)] > 1}
    return found


class Recomputation:
    """Which shards of a job are recomputed, and how that goes.

    A shard is by "auto" once it, or one whose arguments take no more bytes, has run out of memory.
    """

    def __init__(
        self, model: nn.Module, groups: Sequence[Group], asked: str, precision: Precision
    ) -> None:
        """Look for the blocks where they are asked for.

        Raises:
            BadInputs: the model has none.
        """
        self._model, self._groups, self._asked = model, groups, asked
        self._blocks: dict[str, nn.Module] | None = None
        self._comparison = ReplayComparison(precision)
        self._latest: Position | None = None
        self._shards: set[Position] = set()
        self._least_bytes: int | None = None
        if asked not in ("auto", "off"):
            self._least_bytes = 0
            if not self.blocks:
                raise BadInputs(_no_blocks(model, asked))

    @property
    def blocks(self) -> dict[str, nn.Module]:
        """The modules that are cut out, by name."""
        if self._blocks is None:
            self._blocks = repeated_blocks(self._model, self._asked)
        return self._blocks

    def after_out_of_memory(self) -> bool:
        """Have the shard that was called last recomputed, and larger ones.

        Returns:
            Whether it was not before, so that another try may fit.
        """
        latest = self._latest
        if self._asked != "auto" or latest is None or latest in self._shards or not self.blocks:
            return False
        num_bytes = _num_bytes(self._groups[latest.group].shards[latest.shard])
        self._least_bytes = min(num_bytes, self._least_bytes or num_bytes)
        return True

    @property
    def in_force(self) -> bool:
        """Whether any shard may be recomputed by now."""
        return self._least_bytes is not None

    def wanted(self, position: Position, arguments: Mapping[str, Any]) -> bool:
        """Return whether a shard that is called now is recomputed."""
        self._latest = position
        return self._least_bytes is not None and _num_bytes(arguments) >= self._least_bytes

    @contextmanager
    def blocks_cut(
        self, position: Position, where: str, rerun: Callable[[], Rerun]
    ) -> Iterator[None]:
        """Cut the graph of a call at the blocks.

        Args:
            where: the shard's name in messages.
            rerun: called where a block begins.

        Raises:
            ReplayMismatch: in the backward pass, a block's second run differs from its first.
        """
        self._shards.add(position)
        hooks = saved_tensor_hooks()
        with ExitStack() as patched:
            for name, block in self.blocks.items():
                run = partial(_BlockRun, f"{where}: block {name!r}", block, block.forward)
                cut = _cut(block, partial(run, self._comparison, rerun), hooks)
                patched.enter_context(_forward_replaced(block, cut))
            yield

    def difference(self) -> float:
        """Return the largest difference of a second run so far; waits for the device.

        Raises:
            ReplayMismatch: one is beyond its dtype's tolerance.
        """
        return self._comparison.finish()

    def done(self, positions: Iterable[Position]) -> Recomputed:
        """Return what was recomputed of some shards."""
        num_shards = len(self._shards.intersection(positions))
        return Recomputed(tuple(self.blocks), num_shards) if num_shards else Recomputed()


def _num_bytes(arguments: Mapping[str, Any]) -> int:
    return sum(value.nbytes for value in arguments.values() if isinstance(value, Tensor))


def _no_blocks(model: nn.Module, asked: str) -> str:
    if asked == "blocks":
        return (
            f"recompute: expected a model with repeated blocks, children of one class in a "
            f"ModuleList or Sequential that have modules in them, got {type(model).__name__} "
            f"without any; name its blocks by a pattern, or use 'off'"
        )
    names = [name for name, _ in model.named_modules() if name][:5]
    return (
        f"recompute: expected 'off', 'blocks', 'auto', or a pattern over names of submodules, got "
        f"{asked!r}, which matches none that is called; there are {', '.join(map(repr, names))}, …"
    )


@contextmanager
def _forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    attributes = vars(module)
    own = attributes.get("forward")
    attributes["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del attributes["forward"]
        else:
            attributes["forward"] = own


def _cut(
    block: nn.Module, begin: Callable[[tuple[str, ...]], _BlockRun], hooks: object
) -> Callable[..., Any]:
    """Return what is called in the place of a block's `forward`.

    Args:
        hooks: those on saved tensors outside the model.
    """
    original = block.forward

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        tensors = filter(torch.is_tensor, tree_leaves((args, kwargs)))
        differentiated = any(t.requires_grad for t in tensors) or any(
            p.requires_grad for p in block.parameters()
        )
        if not (differentiated and torch.is_grad_enabled() and saved_tensor_hooks() == hooks):
            return original(*args, **kwargs)
        # By position, for torch holds on to what goes by keyword beside the graph.
        return checkpoint(
            begin(tuple(kwargs)),
            *args,
            *kwargs.values(),
            use_reentrant=False,
            preserve_rng_state=False,
            early_stop=False,  # so that there are outputs to compare
        )

    return forward


class _BlockRun:
    """One call of a block: made once, and once more in each backward pass."""

    def __init__(
        self,
        where: str,
        block: nn.Module,
        forward: Callable[..., Any],
        comparison: ReplayComparison,
        rerun: Callable[[], Rerun],
        keywords: tuple[str, ...],
    ) -> None:
        self._where, self._block, self._forward = where, block, forward
        self._comparison, self._keywords = comparison, keywords
        self._rerun, self._state = rerun(), _BlockState(block)
        self._first: Outputs | None = None

    def __call__(self, *values: Any) -> Any:
        if self._first is None:
            return self._run_first(values)
        now = _BlockState(self._block)
        try:
            with self._rerun():
                self._state.restore()
                output = self._called(values)
        except Exception as error:
            if isinstance(error, EngineError) or is_out_of_memory(error):
                raise
            raise ReplayMismatch(
                f"{self._where}: computed again, it raised {type(error).__name__}: {error}; where "
                f"a cache goes from block to block, switch it off (use_cache=False), or use "
                f"recompute='off'"
            ) from error
        finally:
            now.restore()
        self._comparison.compare(self._where, _outputs(output), self._first)
        return output

    def _run_first(self, values: tuple[Any, ...]) -> Any:
        tensors = [v for v in values if isinstance(v, Tensor) and not v.is_inference()]
        before = list(map(version_of, tensors))
        output = self._called(values)
        if list(map(version_of, tensors)) != before:
            raise BadInputs(
                f"{self._where}: expected a block that leaves its arguments as they are, for it is "
                f"computed again from them, got one that overwrites one in place; name other "
                f"blocks by recompute=, or use 'off'"
            )
        self._state.drop_unchanged()
        self._first = _outputs(output)
        return output

    def _called(self, values: tuple[Any, ...]) -> Any:
        at = len(values) - len(self._keywords)
        return self._forward(*values[:at], **dict(zip(self._keywords, values[at:], strict=True)))


def _outputs(output: Any) -> Outputs:
    """Return some entries of the floating-point tensors in a block's output."""
    tensors = filter(torch.is_tensor, tree_leaves(output))
    return sketch({str(i): t for i, t in enumerate(tensors) if t.is_floating_point()})


class _BlockState:
    """The attributes and buffers of a block's modules at one moment, and the buffers' numbers."""

    def __init__(self, block: nn.Module) -> None:
        tables: list[MutableMapping[str, Any]] = []
        for module in block.modules():
            tables += [vars(module), buffers_of(module)]
        self._tables = [(table, dict(table)) for table in tables if isinstance(table, dict)]
        self._numbers = [
            (buffer, version_of(buffer), buffer.detach().clone())
            for buffer in block.buffers()
            if not buffer.is_inference()
        ]

    def drop_unchanged(self) -> None:
        """Drop the numbers of buffers that nobody has written to."""
        self._numbers = [saved for saved in self._numbers if version_of(saved[0]) != saved[1]]

    @torch.no_grad()
    def restore(self) -> None:
        """Put all of it back."""
        for table, entries in self._tables:
            forward = table.get("forward")  # replaced where the block is called, see `blocks_cut`
            if table.keys() != entries.keys() or any(
                table[name] is not value for name, value in entries.items()
            ):
                table.clear()
                table.update(entries)
                table.pop("forward", None)
                if forward is not None:
                    table["forward"] = forward
        for buffer, version, numbers in self._numbers:
            if version_of(buffer) != version:
                buffer.data.copy_(numbers)
                set_versions([buffer], [version])
