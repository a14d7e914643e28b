"""From a Python function or nn.Module to a graph of allowed operations, without an example input.

The function runs once on symbols (torch.fx proxies). Inside a torch-function mode every call into
torch is recorded, whatever its arguments are: factories, calls on closure tensors and on parameters
too. So nothing of the function is computed here, no random number is frozen, in-place operations
keep their order, and a parameter cannot be read without its gradient being recorded. Modules are
traced through, never leaves: their `forward` is ordinary Python over symbols.

`torch.no_grad()` regions are recorded as switches of the grad mode, which torch.fx alone would
drop. What cannot be recorded raises `UntraceableLoss` with the line of the user's code. Not seen:
what Python does without asking the symbol, such as `z.dtype is torch.float16`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from traceback import extract_tb
from typing import Any, Final

import torch
from torch.fx import Graph as FxGraph
from torch.nn.parameter import is_lazy

from gradbox.errors import InvalidInputs, UntraceableLoss
from gradbox.graphs.call_signature import bound_names
from gradbox.graphs.check import check_graph
from gradbox.graphs.schema import Graph
from gradbox.tracing.encode import encode
from gradbox.tracing.interception import intercepting
from gradbox.tracing.module_state import (
    buffers,
    submodules,
    trainable_parameters,
    write_replaced_buffers,
)
from gradbox.tracing.recording import Recorder, Recording
from gradbox.tracing.refusals import LAZY, NO_NUMBER, SCRIPTED, TRANSFORMED
from gradbox.tracing.source_location import raised_line
from gradbox.tracing.torch_modules import FORMULAS
from gradbox.tracing.writes import check_shared_memory

# What a user's function raises when it meets a symbol, or when it is wrong by itself. An exception
# class of the user's own passes as it is.
_RAISED: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class Traced:
    """A graph with the tensors it reads.

    `constants` are closure tensors and frozen parameters; `parameters` are the trainable parameters
    of the module, by their names in it, and get gradients; `buffers` are its buffers, by their
    names too. All are the caller's own tensors, not copies.
    """

    graph: Graph
    constants: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All that the graph reads, by name."""
        return {**self.constants, **self.buffers, **self.parameters}


def trace(
    function: Callable[..., Any],
    *,
    positional: int = 0,
    arguments: Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
    structured: bool = False,
) -> Traced:
    """Record what a function does with its arguments.

    Args:
        function: a function, functools.partial, nn.Module, or bound method of an nn.Module.
        positional: how many arguments are given by position, whatever the function calls them:
            1 for a loss over one unnamed group.
        arguments: the names of those given by keyword: group names, loss inputs. A parameter of
            the function that is not given takes its default.
        options: arguments with Python values (numbers, strings, flags), recorded as they are.
        structured: an argument may be a model's output or a dict, so any public attribute of it is
            a field, and the function may return a dict of tensors (a readout).

    Raises:
        InvalidInputs: the function does not take these arguments.
        UntraceableLoss: it does something that cannot be recorded; the message has the line.
        GraphRefused: it was recorded, and exceeds a limit of `gradbox.graphs.check`.
    """
    scripted = (torch.jit.ScriptFunction, torch.jit.ScriptModule)
    if any(isinstance(part, scripted) for part in (function, *submodules(function))):
        raise UntraceableLoss("; ".join(SCRIPTED))
    for module in submodules(function):
        if any(is_lazy(parameter) for parameter in module.parameters(recurse=False)):
            raise UntraceableLoss(LAZY.format(type(module).__name__))
    options = dict(options or {})
    keywords = tuple(arguments or ())
    names = bound_names(function, positional, keywords, tuple(options))
    held = buffers(function)
    recording = Recording(
        FxGraph(), parameters=trainable_parameters(function), buffers=held, structured=structured
    )
    symbols = [recording.argument(name) for name in (*names, *keywords)]
    given = dict(zip(keywords, symbols[len(names) :], strict=True))
    with intercepting(function, recording), Recorder(recording, FORMULAS):
        result = _call(function, symbols[: len(names)], {**given, **options})
        write_replaced_buffers(recording, held, buffers(function))
    for error in recording.refused:  # caught by the function, which went on without the value
        raise error
    _check_result(result, of=function, structured=structured)
    recording.output(result)
    graph = encode(recording.graph)
    traced = Traced(graph, recording.constants, recording.parameters, recording.buffers)
    if recording.writes:
        check_shared_memory(recording.graph, traced.tensors)
    check_graph(graph, traced.tensors)
    return traced


def _call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    try:
        return function(*args, **kwargs)
    except (InvalidInputs, UntraceableLoss):
        raise
    except _RAISED as error:
        line = raised_line(error.__traceback__)
        raise UntraceableLoss(f"{line}{_explain(error)}") from error


def _explain(error: Exception) -> str:
    message = f"{type(error).__name__}: {error}"
    if "Declaration: " in message:  # TorchScript's way to refuse an argument
        return "; ".join(SCRIPTED)
    if any("/_functorch/" in frame.filename for frame in extract_tb(error.__traceback__)):
        return "; ".join(TRANSFORMED)
    if "Symbol" in str(error) or "Proxy(" in str(error):
        return f"a Python number or a tensor with values is needed here ({message}); {NO_NUMBER}"
    return f"the function raised {message}; correct it, or write this step with torch functions"


def _check_result(result: Any, *, of: Callable[..., Any], structured: bool) -> None:
    if isinstance(result, torch.Tensor | torch.fx.Proxy):
        return
    if structured and isinstance(result, dict) and all(isinstance(key, str) for key in result):
        return
    expected = "a tensor or a dict of tensors" if structured else "a scalar tensor"
    got = "nothing" if result is None else type(result).__name__
    name = getattr(of, "__name__", type(of).__name__)
    raise UntraceableLoss(f"{name} must return {expected}, and it returns {got}")
