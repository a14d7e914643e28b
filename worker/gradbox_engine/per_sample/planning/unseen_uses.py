"""Uses of parameters that no function call shows, found in the graph of a probe run.

A derivative that a model takes of itself depends on its parameters by operations of the backward
pass; a `torch.func` transform, a scripted function and what runs under `DisableTorchFunction` are
not seen either. Their rows would lack what such a use adds, and where that is little, as it may be
beside the rounding of 16 bits, no comparison of numbers tells.

From what a function returned, every path to a parameter has to pass what entered the function, or
what another one returned. A path that does not is an unseen use. Tensors made of parameters alone
count as parameters here: a path may pass them where they entered, but not where a write to a view
of one had given it another edge, behind which the write is.

Not seen: a custom Function that reads parameters which are not its arguments, and makes their
gradients by a `backward` of its own; `gradients.asked_for` is about these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

from torch import Tensor

from gradbox_engine.per_sample.recording.use_log import Edge, Use


def unseen_uses(
    uses: Sequence[Use],
    ends: Iterable[Edge],
    derived: Collection[int],
    parameters: Mapping[str, Tensor],
) -> set[str]:
    """Return the parameters with a use that is not among `uses`.

    Args:
        uses: of one run, whose graph is alive.
        ends: the edges of z.
        derived: the numbers of the uses that make tensors of parameters alone.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    returned = [use.leaves | use.within for n, use in enumerate(uses) if n not in derived]
    seen = frozenset().union(*returned)
    found = _behind(set(ends) - seen, names, lambda edge: edge in seen)
    for use in uses:
        enters = _entered(use, uses, derived)
        closed = partial(_ends_at, use, enters, seen)
        found |= _behind(use.leaves - enters, names, closed)
    return found


def _entered(use: Use, uses: Sequence[Use], derived: Collection[int]) -> frozenset[Edge]:
    """Return the edges by which tracked tensors entered a function, as they were made."""
    moved = (
        isinstance(key, tuple) and key[0] in derived and not edges & uses[key[0]].leaves
        for key, edges in zip(use.keys, use.enters, strict=True)
    )
    return frozenset().union(*(e for e, m in zip(use.enters, moved, strict=True) if not m))


def _ends_at(use: Use, enters: Collection[Edge], seen: Collection[Edge], edge: Edge) -> bool:
    """Return whether a path from what a function returned has left the function at this edge."""
    return edge in enters or (edge in seen and edge not in use.within)


def _behind(
    starts: Iterable[Edge], names: Mapping[int, str], closed: Callable[[Edge], bool]
) -> set[str]:
    """Return the parameters to which a path leads that passes nothing closed."""
    left, visited, found = [node for node, _ in starts], set(), set()
    while left:
        node = left.pop()
        if node in visited:
            continue
        visited.add(node)
        if not node.next_functions:
            name = names.get(id(getattr(node, "variable", None)))
            found |= set() if name is None else {name}
        for following, output in node.next_functions:
            if following is not None and not closed((following, output)):
                left.append(following)
    return found
