"""What a forward pass may not do to the registered model, for nothing puts it back.

It may write to no parameter, see `written_parameters`; register none, for that has no gradient; and
register no hook on one, which would run once more for each pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from gradbox_engine.errors import EngineError, ModelCallFailed
from gradbox_engine.model.state.written_parameters import ParameterWatch


class Changes:
    """The changes that a job's forward passes have made."""

    def __init__(
        self,
        model: nn.Module,
        registered: Sequence[Tensor],
        watch: ParameterWatch,
        *,
        differentiated: bool,
    ) -> None:
        """Note what the model has before the first pass.

        Args:
            registered: its parameters.
            differentiated: whether any of them is.
        """
        self._model = model
        self._registered = registered
        self._watch = watch
        self._differentiated = differentiated
        self._num_hooks = [len(p._backward_hooks or ()) for p in registered]

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Refuse them at the end of what is in here, after which the model stays prepared.

        Raises:
            ModelCallFailed: the model has made one.
        """
        try:
            yield
        except EngineError as error:
            self._watch.look(self._model)
            self._watch.explain(error)
            raise
        self.refuse_new()
        self._watch.look(self._model)
        self._watch.refuse()

    def refuse_new(self) -> None:
        """Refuse new parameters, and hooks.

        Raises:
            ModelCallFailed: there are some.
        """
        if not self._differentiated:
            return
        num_hooks = dict(zip(map(id, self._registered), self._num_hooks, strict=True))
        for name, parameter in self._model.named_parameters():
            if id(parameter) not in num_hooks:
                if parameter.requires_grad:
                    raise ModelCallFailed(
                        f"parameter {name!r}: expected the model to have it when it was "
                        f"registered, got it in the forward pass, so it has no gradient; call the "
                        f"model once where it is built, or make it there"
                    )
            elif len(parameter._backward_hooks or ()) != num_hooks[id(parameter)]:
                raise ModelCallFailed(
                    f"parameter {name!r}: expected its hooks to stay as they were registered, got "
                    f"others after the forward pass, which every pass would add to; register them "
                    f"where the model is built"
                )
