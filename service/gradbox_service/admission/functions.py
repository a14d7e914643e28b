"""Are the functions of a job allowed to run, and is each given what it takes?"""

from __future__ import annotations

from gradbox.builtin_losses.signatures import check_builtin
from gradbox.errors import InvalidInputs
from gradbox.graphs.check import check_graph
from gradbox.protocol import BuiltinLoss, GraphLoss, SetLossSpec, SharedSpec

# readout(output, inputs)
READOUT_ARGUMENTS = 2


def check_loss(spec: SetLossSpec) -> None:
    """Check the loss.

    One group of inputs is its first argument whatever it is called; several are arguments by name.

    Raises:
        GraphRefused: see `check_graph`.
        InvalidJob: see `check_builtin`.
    """
    groups = [group.name for group in spec.inputs]
    positional = 1 if len(groups) == 1 else 0
    by_name = [*spec.loss_inputs, *(groups if len(groups) > 1 else ())]
    if isinstance(spec.loss, GraphLoss):
        function = spec.loss.function
        check_graph(function.graph, function.tensors, positional=positional, arguments=by_name)
    elif isinstance(spec.loss, BuiltinLoss):
        check_builtin(spec.loss.name, spec.loss.options, groups=groups, inputs=spec.loss_inputs)


def check_readout(spec: SharedSpec) -> None:
    """Check the readout, if there is one.

    Raises:
        GraphRefused: see `check_graph`.
    """
    if spec.readout is not None:
        graph, tensors = spec.readout.graph, spec.readout.tensors
        check_graph(graph, tensors, positional=READOUT_ARGUMENTS, arguments=())


def check_penalties(spec: SetLossSpec) -> None:
    """Check the penalties' losses and scales.

    Raises:
        GraphRefused: see `check_graph`.
        InvalidInputs: one has parameters of its own, which nothing differentiates.
    """
    for index, penalty in enumerate(spec.penalties):
        for function in (penalty.loss, penalty.per_sample_scale):
            if function is None:
                continue
            check_graph(function.graph, function.tensors, positional=1, arguments=())
            trainable = [name for name, ref in function.tensors.items() if ref.requires_grad]
            if trainable:
                raise InvalidInputs(
                    f"penalties.{index} at {penalty.at!r}: its parameters are held constant, but "
                    f"{trainable} require grad; detach them, or move the term into the loss"
                )
