"""`Forward`: the outputs alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradbox.arguments import explain_arguments
from gradbox.computations.computation import Differentiated, Submission, checked, listed
from gradbox.inputs.known_tensors import KnownTensors
from gradbox.inputs.uploads import Uploads
from gradbox.protocol import ForwardSpec
from gradbox.protocol.options import Retain
from gradbox.protocol.spec import ForwardReturned


@explain_arguments
@dataclass(frozen=True, kw_only=True, eq=False)
class Forward(Differentiated):
    """Z, the outputs of all shards, in the dtype in which the model gives them.

        Z = client.run(Forward(model="minilm", inputs=shards, readout=pool)).outputs["z"]

    The arguments that all computations share (inputs, mode, seed, weights, …) are described at
    `gradbox.computations.Computation`.

    Args:
        retain: memory in bytes for graphs that wait on the box for a `Gradient` at `Cotangents` of
            Z, or "auto": what is free. Such a gradient then needs no replay, if it comes within a
            minute, with the same `wrt`, and before the worker starts another job.
        wrt: what such a gradient will differentiate, as `Gradient` takes it.
        returns: what the result holds, of "outputs" and "buffers".

    Raises:
        InvalidInputs: the inputs are empty, are not tensors, or do not fit each other.
    """

    retain: Retain = 0
    returns: Sequence[ForwardReturned] = ("outputs",)

    def __repr__(self) -> str:
        shards = " + ".join(f"{len(group.shards)} {group.name}" for group in self.groups)
        return f"Forward(model={self.model!r}, shards={shards})"

    def prepare(self, known: KnownTensors | None = None) -> Submission:
        uploads = Uploads(known)
        fields = self.shared_fields(uploads)
        spec = checked(ForwardSpec, computation="forward", returns=listed(self.returns), **fields)
        return Submission.of(spec, uploads)
