"""The models a device process holds: each is built once and stays on the device.

The least recently used ones leave the device when the budget for weights is exceeded, and are
built again when a job asks for them; the version is then checked against the first one's. So it is
with models that an earlier process described: each is built when a job needs it.
"""

from __future__ import annotations

import gc
import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from gradbox.errors import UnknownModel
from gradbox.protocol import ModelView
from gradbox_worker.errors import ModelsFileError
from gradbox_worker.exceptions_to_problems import Caught, caught
from gradbox_worker.models.builders import build_model, source_code_digest
from gradbox_worker.models.describe import describe_model
from gradbox_worker.models.models_file import ModelEntry
from gradbox_worker.models.version import model_version

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A model on the device."""

    module: nn.Module
    view: ModelView
    methods: tuple[str, ...]
    size_bytes: int  # of its parameters and buffers


class Registry:
    """The models of one models file on one device."""

    def __init__(
        self,
        entries: Mapping[str, ModelEntry],
        *,
        device: torch.device,
        budget_bytes: int | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        """Hold no model yet.

        Args:
            versions: what the box has been told of them; a model that is built as another version
                is refused.
            budget_bytes: how many bytes of weights may stay on the device, or None for no limit.
                A single model larger than that is loaded all the same.
        """
        self.device = device
        self._entries = dict(entries)
        self._budget_bytes = budget_bytes
        self._loaded: OrderedDict[str, Loaded] = OrderedDict()  # the last one was used last
        self._versions = dict(versions or {})

    def describe(self) -> list[ModelView]:
        """Build every model once and describe it.

        Raises:
            ModelsFileError: a model cannot be built.
        """
        return [self._get(name).view for name in self._entries]

    def holds(self, name: str) -> bool:
        """Tell whether a model is on the device, so that `get` need not load it."""
        return name in self._loaded

    def sizes_bytes(self) -> dict[str, int]:
        """Return how many bytes of weights each model has on the device, by name."""
        return {name: loaded.size_bytes for name, loaded in self._loaded.items()}

    def get(self, name: str, version: str | None = None) -> Loaded:
        """Return a model, ready on the device.

        Args:
            version: all of the version's digits, or at least the first eight.

        Raises:
            UnknownModel: no such name, or the model that is registered has another version.
        """
        if name not in self._entries:
            raise UnknownModel(
                f"expected one of this worker's models ({', '.join(self._entries)}), got {name!r}; "
                f"see `gradbox models list`"
            )
        loaded = self._get(name)
        current = loaded.view.version
        if version is not None and not (len(version) >= 8 and current.startswith(version)):
            raise UnknownModel(
                f"expected model {name!r} at version {version}, but the registered one is "
                f"{current}; submit the job again for the version that is registered now"
            )
        return loaded

    def _get(self, name: str) -> Loaded:
        loaded = self._loaded.get(name)
        if loaded is None:
            loaded = self._loaded[name] = self._load(self._entries[name])
        self._loaded.move_to_end(name)
        return loaded

    def _load(self, entry: ModelEntry) -> Loaded:
        module = caught(
            lambda: build_model(entry),
            doing=f"the model {entry.name!r}",
            let_through=ModelsFileError,
        )
        if isinstance(module, Caught):
            raise ModelsFileError(module.problem.detail)
        version = model_version(module, code=source_code_digest(entry))
        expected = self._versions.setdefault(entry.name, version)
        if version != expected:
            raise UnknownModel(
                f"expected model {entry.name!r} to be built again as version {expected}, got "
                f"{version}: its files changed while the worker ran, or its builder draws random "
                f"weights of its own; restart the worker"
            )
        tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}.values()
        size_bytes = sum(t.numel() * t.element_size() for t in tensors)
        self._make_room(size_bytes)
        module.to(self.device)
        log.info("loaded %s (%d bytes) at version %s", entry.name, size_bytes, version)
        view = describe_model(entry, module, version=version)
        return Loaded(module=module, view=view, methods=entry.methods, size_bytes=size_bytes)

    def _make_room(self, wanted_bytes: int) -> None:
        if self._budget_bytes is None:
            return
        held_bytes = sum(loaded.size_bytes for loaded in self._loaded.values())
        while self._loaded and held_bytes + wanted_bytes > self._budget_bytes:
            name, dropped = self._loaded.popitem(last=False)
            held_bytes -= dropped.size_bytes
            log.info("dropped %s from %s to make room", name, self.device)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
