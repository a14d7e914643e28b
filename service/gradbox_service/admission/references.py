"""Where a spec names tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gradbox.protocol import SharedSpec, TensorRef, TracedFunction

References = Iterable[tuple[str, TensorRef]]
"""Each reference to a single tensor, with the place in the spec where it stands."""


def shared_references(spec: SharedSpec) -> References:
    """Give the references of what all computations are told."""
    for group in spec.inputs:
        if group.order is not None:
            yield f"inputs.{group.name}.order", group.order
    yield from named_references("weights", spec.weights)
    yield from function_references("readout", spec.readout)


def function_references(place: str, function: TracedFunction | None) -> References:
    """Give the references of a traced function, if there is one."""
    if function is not None:
        yield from named_references(f"{place}.tensors", function.tensors)


def named_references(place: str, references: Mapping[str, object]) -> References:
    """Give those entries that are tensors."""
    for name, value in references.items():
        if isinstance(value, TensorRef):
            yield f"{place}.{name}", value
