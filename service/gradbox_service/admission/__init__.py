"""Checks a posted job against the box before it is accepted.

What can be known without torch is known here, at once, rather than minutes later in a queue: the
model and its version, entry points and argument names, blobs and the tensors in them, graphs,
names of parameters. Shapes and values are the worker's to judge.
"""

from __future__ import annotations

from gradbox.errors import InvalidInputs
from gradbox.protocol import GraphLoss, JobSpec, ModelView, TensorRef, TracedFunction
from gradbox_service.admission.arguments import check_groups
from gradbox_service.admission.functions import check_loss, check_penalties, check_readout
from gradbox_service.admission.model import find_model
from gradbox_service.admission.parameters import check_weights, check_wrt
from gradbox_service.admission.tensors import Tensors
from gradbox_service.jobs import Fleet
from gradbox_service.store import BlobStore


def admit(spec: JobSpec, *, fleet: Fleet, blobs: BlobStore) -> ModelView:
    """Return the model that the job will run on.

    Raises:
        UnknownModel: see `find_model`.
        MissingBlobs: the box does not have every blob that the job names.
        GraphRefused: the loss, the readout or a penalty is not an allowed graph.
        InvalidInputs: names do not fit the model, the blobs or each other.
        ServiceUnavailable: no worker has said yet which models there are.
    """
    model = find_model(spec.model, fleet=fleet)
    _check_group_names(spec)
    references = _references(spec)
    shards = {shard.blob for group in spec.inputs for shard in group.shards}
    tensors = Tensors.load(shards | {ref.blob for _, ref in references}, blobs=blobs)
    for where, reference in references:
        tensors.entry(reference, where=where)
    check_groups(spec, model=model, tensors=tensors)
    check_loss(spec)
    check_readout(spec)
    check_penalties(spec)
    check_weights(spec, model=model, tensors=tensors)
    check_wrt(spec, model=model, tensors=tensors)
    return model


def _check_group_names(spec: JobSpec) -> None:
    names = [group.name for group in spec.inputs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidInputs(f"inputs: group names must differ, got {twice} more than once")
    both = sorted(set(names) & set(spec.loss_inputs))
    if both:
        raise InvalidInputs(
            f"loss_inputs: {both} are names of input groups too; the loss could not tell them "
            "apart: rename one of the two"
        )


def _references(spec: JobSpec) -> list[tuple[str, TensorRef]]:
    """Return every reference to a single tensor, with the place in the spec where it stands."""
    named: dict[str, TracedFunction | None] = {
        "loss": spec.loss.function if isinstance(spec.loss, GraphLoss) else None,
        "readout": spec.readout,
    }
    for index, penalty in enumerate(spec.penalties):
        named[f"penalties.{index}.loss"] = penalty.loss
        named[f"penalties.{index}.per_sample_scale"] = penalty.per_sample_scale
    found = [
        (f"{place}.tensors.{name}", reference)
        for place, function in named.items()
        if function is not None
        for name, reference in function.tensors.items()
    ]
    found += [
        (f"loss_inputs.{name}", value)
        for name, value in spec.loss_inputs.items()
        if isinstance(value, TensorRef)
    ]
    found += [
        (f"inputs.{group.name}.order", group.order)
        for group in spec.inputs
        if group.order is not None
    ]
    return found + [(f"weights.{name}", reference) for name, reference in spec.weights.items()]
