"""A registered model as a callable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from threading import RLock
from typing import Any, Final, NoReturn, Protocol

import torch
from torch import Tensor, nn

from gradbox.computations import Computation, Forward, Gradient
from gradbox.errors import InvalidInputs
from gradbox.printable import printable
from gradbox.protocol import ModelView
from gradbox.remote.autograd import NotFetched
from gradbox.remote.calls import read_call
from gradbox.remote.forward_job import (
    BARE,
    CallFacts,
    DoneRemoteForward,
    RemoteForward,
    RemoteOptions,
    RemoteOutput,
)
from gradbox.remote.state import RemoteBuffers, rounded_weights, same, snapshot, trainable_leaves
from gradbox.results.result import GradResult, add_gradients

# The box takes no more groups in one job.
MAX_CALLS: Final = 1000


class Client(Protocol):
    """What a remote model needs of a `GradClient`."""

    @property
    def url(self) -> str:
        """Where the box is."""

    def run(self, computation: Computation, *, progress: bool | None) -> GradResult:
        """Submit a job, wait for it and return its result."""


class RemoteModel:
    """A model on the box; `GradClient.model` makes one.

    Calls return tensors that are fetched when they are first used. Up to then calls are gathered:
    all of them become one forward job, in the order in which they were made. `loss.backward()` runs
    one gradient job for each forward job that it reaches. Entry points other than `forward` are
    methods by their names.

    Buffers, such as batch-norm statistics, advance once per call, as a local model's do; they begin
    as the registered model has them, or as `weights` says. One among `weights` that is changed
    later begins anew from its new numbers.

    Several threads may use one: calls are counted in the order in which they are made.

    Attributes:
        weights: tensors laid over the registered parameters; may be live ones that an optimizer
            changes: a call sees the numbers they have when it is made.
    """

    def __init__(
        self,
        client: Client,
        view: ModelView,
        *,
        weights: Mapping[str, Any] | None,
        options: RemoteOptions,
        progress: bool | None,
    ) -> None:
        if not isinstance(weights, Mapping | None):
            raise InvalidInputs(
                f"weights: expected {{name: tensor}}, got {type(weights).__name__}; "
                f"write model.state_dict(), and of a run run.model(...)"
            )
        self.weights = dict(weights or {})
        self.anchor = torch.zeros((), requires_grad=True)
        self._client = client
        self._view = view
        self._mode = options.mode
        self.options = options
        self._progress = progress
        self._names = _output_names(options.readout)
        self._num_calls = 0
        self._waiting: list[RemoteForward] = []
        self._buffers = RemoteBuffers(view, widened=options.widened)
        self._grads: dict[str, Tensor] = {}
        self._lock = RLock()  # over calls that wait, buffers and gradients

    def __repr__(self) -> str:
        return f"<RemoteModel {printable(self._view.name)} at {self._client.url}, {self._mode}>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InvalidInputs(
            "expected a remote model to stay where it was made, got one to be copied or pickled: "
            "make another by client.model(...), with weights= copies of the tensors that it has"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; a single dict or tuple is the arguments of a shard.

        Returns:
            The output, or {name: output} where the readout gives several.

        Raises:
            InvalidInputs: the arguments are not tensors, or not those of the entry point.
        """
        return self._call("forward", args, kwargs)

    def __getattr__(self, name: str) -> Any:
        methods = self.__dict__["_view"].methods if "_view" in self.__dict__ else {}
        if name in methods:
            return lambda *args, **kwargs: self._call(name, args, kwargs)
        raise AttributeError(
            f"a remote model has no attribute {name!r}: its entry points are {sorted(methods)}; "
            f"its parameters are on the box: give new ones by weights=, take gradients by .grads "
            f"or .apply_to(module)"
        )

    def train(self, mode: bool = True) -> RemoteModel:
        """Let the calls that follow run as `nn.Module.train` does."""
        self._mode = "train" if mode else "eval"
        return self

    def eval(self) -> RemoteModel:
        """Let the calls that follow run as `nn.Module.eval` does."""
        return self.train(False)

    @property
    def training(self) -> bool:
        """Whether the next call runs in train mode."""
        return self._mode == "train"

    @property
    def grads(self) -> dict[str, Tensor]:
        """The gradients so far, summed over backward passes: name → tensor of its shape.

        A parameter that no backward pass has reached is not there; a local one's `.grad` is None.
        """
        return {
            view.name: self._grads[view.name]
            for view in self._view.parameters
            if view.name in self._grads
        }

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers after all calls so far, which are run if they have not been."""
        with self._lock:
            for last in self._waiting[-1:]:
                self.run_until(last)
            return dict(self._buffers.values)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        with self._lock:
            self._grads.clear()

    def apply_to(self, module: nn.Module, *, strict: bool = True) -> None:
        """Add the gradients into `.grad` of a local module, as `GradResult.apply_to` does.

        Raises:
            InvalidInputs: an unknown name or another shape; nothing was changed.
        """
        add_gradients(module, self.grads, strict=strict)

    def run_job(self, computation: Forward | Gradient) -> GradResult:
        """Run a job."""
        return self._client.run(computation, progress=self._progress)

    def add_grads(self, grads: Mapping[str, Tensor]) -> None:
        """Add to the gradients."""
        with self._lock:
            for name, gradient in grads.items():
                if name in self._grads:
                    self._grads[name] = self._grads[name] + gradient
                else:
                    self._grads[name] = gradient.clone()

    def done_forward(self, result: GradResult, calls: Mapping[int, CallFacts]) -> DoneRemoteForward:
        """Return the backward half of a forward job that is done."""
        return DoneRemoteForward(self, result=result, calls=calls)

    def run_until(self, forward: RemoteForward) -> None:
        """Run the forward jobs that wait, up to this one; each begins with the buffers of the last.

        Raises: what one before it failed with.
        """
        with self._lock:
            while forward in self._waiting:
                first = self._waiting[0]
                self._run(first)
                self._waiting.remove(first)
                first.check()  # without it the next one would begin with older buffers

    def _run(self, forward: RemoteForward) -> None:
        returns = ("outputs", "buffers") if self._view.buffers else ("outputs",)
        # Buffers go as they are: rounded in every job, a running average would stand still.
        given, parameters = forward.weights, self._view.parameter_names()
        sent = rounded_weights(given, parameters, transfer=self.options.transfer)
        result = forward.run(self._buffers.under(sent, given=given), returns=returns)
        if result is not None:
            self._buffers.advance(result, given=given)

    def _call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        read = read_call(args, kwargs, method=method, signature=self._view.methods[method])
        # Not above: what was given may be an output of another model, which waits for its lock.
        with self._lock:
            call = replace(read, index=self._num_calls)
            forward = self._open_forward()
            forward.calls.append(call)
            self._num_calls += 1
        outputs = {
            name: RemoteOutput.standing_for(
                forward,
                (call.index, name),
                holder=NotFetched.apply(self.anchor),  # type: ignore[no-untyped-call]
            )
            for name in self._names
        }
        return outputs[BARE] if self._names == (BARE,) else outputs

    def _open_forward(self) -> RemoteForward:
        """Return the job that the next call joins: the last one if nothing changed since."""
        last = self._waiting[-1] if self._waiting else None
        if (
            last is None
            or len(last.calls) >= MAX_CALLS
            or last.mode != self._mode
            or not self._are_newest(last.weights)
        ):
            weights, leaves = self._newest_weights()
            last = RemoteForward(
                self, mode=self._mode, weights=weights, leaves=leaves, names=self._names
            )
            self._waiting.append(last)
        return last

    def _are_newest(self, weights: Any) -> bool:
        """Return whether the weights of a job that waits are those of the next call."""
        return same(weights, self.weights)

    def _newest_weights(self) -> tuple[Any, Sequence[Any]]:
        """Return the weights of the next call, and those of them that want gradients."""
        return snapshot(self.weights), trainable_leaves(self.weights)


def _output_names(readout: Callable[..., Any] | None) -> tuple[str, ...]:
    """Return the names of the outputs, (BARE,) for a single tensor."""
    if readout is None:
        return (BARE,)
    from gradbox.tracing.trace import trace

    value = trace(readout, positional=2, structured=True).graph.nodes[-1].args[0]
    match value:
        case {"dict": pairs}:
            return tuple(str(key) for key, _ in pairs)
    return (BARE,)
