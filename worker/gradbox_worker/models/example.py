"""A call that a model takes, found by trying: inputs for the example job of its description.

What is tried, in this order, on the CPU, in eval mode, with the model put back afterwards:

- what a transformers model says of itself: its main input, its vocabulary, its image size;
- images, for timm and torchvision;
- what the first layer with weights takes, for every argument without a default.

The first call that returns a floating-point tensor with a graph is the example. A model that takes
none of them has none: its owner and its users know better.
"""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from gradbox.protocol import ExampleInput, ExampleView
from gradbox_engine.model.state.restore import restored
from gradbox_engine.model.state.written_parameters import unwritten_parameters
from gradbox_worker.exceptions_to_problems import Caught, caught

SAMPLES: Final = 2
POSITIONS: Final = 8
IMAGE: Final = 224
AUDIO: Final = 16_000
MOST_TRIES: Final = 16

# Shape without samples, dtype, and the bound of whole numbers.
Spec = tuple[tuple[int, ...], torch.dtype, int | None]
MASK: Final[Spec] = ((POSITIONS,), torch.int64, 2)


def find_example(model: nn.Module, method: str) -> ExampleView | None:
    """Return inputs that the model's entry point takes, or None if none was found."""
    tried = _of_transformers(model) if hasattr(model, "config") else iter(())
    guesses = itertools.chain(tried, _of_images(model), _of_first_layer(model, method))
    for inputs in itertools.islice(guesses, MOST_TRIES):
        found = caught(
            partial(_try, model, method, inputs),
            doing=f"a call of {type(model).__name__} with {sorted(inputs)}",
            log_level=logging.DEBUG,
        )
        if isinstance(found, ExampleView):
            return found
        if isinstance(found, Caught) and found.spoilt:
            return None
    return None


def _try(model: nn.Module, method: str, inputs: Mapping[str, Spec]) -> ExampleView | None:
    # Where the call writes to a parameter, the registry builds the model anew before its first job.
    with (
        unwritten_parameters(model, "eval"),
        restored(model),
        torch.random.fork_rng(devices=[]),
        torch.enable_grad(),
    ):
        torch.manual_seed(0)
        tensors = {name: _draw(spec) for name, spec in inputs.items()}
        found = _floating(getattr(model.eval(), method)(**tensors))
        if found is None:
            return None
        key, output = found
        return ExampleView(
            method=method,
            inputs=[_view(name, tensors[name], high) for name, (_, _, high) in inputs.items()],
            output=key,
            output_shape=list(output.shape),
        )


def _draw(spec: Spec) -> Tensor:
    shape, dtype, high = spec
    if high is None:
        return torch.randn(SAMPLES, *shape, dtype=dtype)
    if high == 2:
        return torch.ones(SAMPLES, *shape, dtype=dtype)
    return torch.randint(high, (SAMPLES, *shape), dtype=dtype)


def _view(name: str, tensor: Tensor, high: int | None) -> ExampleInput:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return ExampleInput(name=name, shape=list(tensor.shape), dtype=dtype, high=high)


def _floating(output: Any) -> tuple[str | int | None, Tensor] | None:
    """Return the first part of an output that can be z, and the key that a job names it by."""
    if isinstance(output, Tensor):
        return (None, output) if _can_be_z(output) else None
    parts: Iterator[tuple[str | int, Any]] = iter(())
    if isinstance(output, Mapping):
        parts = iter(output.items())
    elif isinstance(output, tuple | list):
        parts = enumerate(output)
    return next(((key, part) for key, part in parts if _can_be_z(part)), None)


def _can_be_z(part: Any) -> bool:
    return isinstance(part, Tensor) and part.is_floating_point() and part.requires_grad


def _of_transformers(model: nn.Module) -> Iterator[dict[str, Spec]]:
    config: Any = model.config
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    main = str(getattr(model, "main_input_name", "input_ids"))
    texts = getattr(config, "get_text_config", lambda: config)()
    ids: Spec = ((POSITIONS,), torch.int64, int(getattr(texts, "vocab_size", 0) or 100))
    size = getattr(getattr(config, "vision_config", config), "image_size", IMAGE)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = int(getattr(getattr(config, "vision_config", config), "num_channels", 3))
    image: Spec = ((channels, int(height), int(width)), dtype, None)
    mel: Spec = ((int(getattr(config, "num_mel_bins", 80)), 3000), dtype, None)
    by_name: dict[str, Spec] = {
        "input_ids": ids,
        "pixel_values": image,
        "input_values": ((AUDIO,), dtype, None),
        "input_features": mel,
    }
    accepted = inspect.signature(model.forward).parameters
    first = {main: by_name.get(main, ids)}
    if main == "input_ids" and "attention_mask" in accepted:
        first["attention_mask"] = MASK
    yield first
    yield first | {"decoder_input_ids": ids}
    yield first | {"pixel_values": image}
    yield {main: by_name.get(main, ids)}


def _of_images(model: nn.Module) -> Iterator[dict[str, Spec]]:
    """Yield images of the size that timm says, and of the one that torchvision's models take."""
    name = type(model).__module__.partition(".")[0]
    said = getattr(model, "default_cfg", None)
    shape = tuple(said["input_size"]) if isinstance(said, Mapping) else (3, IMAGE, IMAGE)
    if name in ("timm", "torchvision"):
        yield {"x": (shape, torch.float32, None)}
        yield {"x": ((3, 299, 299), torch.float32, None)}


def _of_first_layer(model: nn.Module, method: str) -> Iterator[dict[str, Spec]]:
    parameters = inspect.signature(getattr(model, method)).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = [p for p in parameters if p.kind in kinds]
    needed = [p.name for p in named if p.default is inspect.Parameter.empty]
    layers = [specs for module in model.modules() if (specs := list(_specs(module)))]
    names = needed or [p.name for p in named[:1]]
    if not names or not layers:
        return
    for spec in layers[0]:
        yield dict.fromkeys(names, spec)
    # Two arguments may belong to two layers: the ids and the positions of an embedding, say.
    if len(layers) >= len(names):
        yield {name: layer[0] for name, layer in zip(names, layers, strict=False)}
    for layer in layers[1:3]:
        yield dict.fromkeys(names, layer[0])


def _specs(module: nn.Module) -> Iterator[Spec]:
    """Yield what a layer takes; nothing for one that is not known by name."""
    dtype = next((p.dtype for p in module.parameters(recurse=False)), torch.float32)
    match module:
        case nn.Embedding() | nn.EmbeddingBag():
            yield (POSITIONS,), torch.int64, module.num_embeddings
            yield (), torch.int64, module.num_embeddings
        case nn.Linear():
            yield (module.in_features,), dtype, None
            yield (POSITIONS, module.in_features), dtype, None
        case nn.Conv1d():
            yield (module.in_channels, 64), dtype, None
        case nn.Conv2d():
            for side in (32, 64, IMAGE, 28):
                yield (module.in_channels, side, side), dtype, None
        case nn.Conv3d():
            yield (module.in_channels, 16, 16, 16), dtype, None
        case nn.RNNBase():
            yield (POSITIONS, module.input_size), dtype, None
        case nn.TransformerEncoderLayer():
            yield (POSITIONS, module.self_attn.embed_dim), dtype, None
        case nn.MultiheadAttention():
            yield (POSITIONS, module.embed_dim), dtype, None
