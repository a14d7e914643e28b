"""The models a device process holds: each is built once and stays on the device.

The least recently used ones leave the device when the budget for weights is exceeded, and when
another model, or a job, runs out of memory. They are built again when a job asks for them; the
version is then checked against the first one's. So it is with models that an earlier process
described: each is built when a job needs it.
"""

from __future__ import annotations

import gc
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import nn

from gradbox.errors import UnknownModel, UnusableModel
from gradbox.protocol import ModelView
from gradbox_engine.model.prepared import model_devices
from gradbox_engine.model.state.written_parameters import why_load_again
from gradbox_worker.errors import ModelsFileError, WeightsDoNotFit
from gradbox_worker.models.builders import build_with_code
from gradbox_worker.models.describe import describe_model, size_bytes, unusable
from gradbox_worker.models.failures import building
from gradbox_worker.models.models_file import ModelEntry
from gradbox_worker.models.version import model_version

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Loaded:
    """A model on the device."""

    name: str
    version: str
    module: nn.Module
    methods: tuple[str, ...]  # the entry points that jobs may call
    size_bytes: int  # of its parameters and buffers
    devices: tuple[torch.device, ...]  # on which they are


class Models(Protocol):
    """The models that jobs on one device may have, as a job's execution sees them."""

    @property
    def device(self) -> torch.device:
        """Of all models that are on one."""

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """On which any of the models may be."""

    def holds(self, name: str) -> bool:
        """Return whether a model is on the device, so that `get` need not load it."""

    def idle_bytes(self, *, but: str) -> int:
        """Return the bytes of weights on the device that a job on the model `but` does not need."""

    def drop_idle(self, *, but: str, wanted_bytes: int) -> list[str]:
        """Drop models that a job does not need; see `Registry.drop_idle`."""

    def get(self, name: str, version: str | None = None) -> Loaded:
        """Return a model, ready on the device."""


class Registry:
    """The models of one models file on one device."""

    def __init__(
        self,
        entries: Mapping[str, ModelEntry],
        *,
        device: torch.device,
        gpus: Sequence[torch.device] = (),
        budget_bytes: int | None = None,
        versions: Mapping[str, str] | None = None,
        unusable: Mapping[str, str] | None = None,
        limit: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Hold no model yet.

        Args:
            device: of all models that fit one GPU.
            gpus: over which larger ones are spread, the device itself first.
            versions: what the box has been told of them; a model that is built as another version
                is refused.
            unusable: why others cannot be built, as an earlier process found out; they are refused
                unbuilt.
            budget_bytes: how many bytes of weights may stay on the device, or None for no limit.
                A single model larger than that is loaded all the same.
            limit: holds the process to the memory that it may take while a model is built.
        """
        self._device = device
        self._gpus = tuple(gpus)
        self._entries = dict(entries)
        self._budget_bytes = budget_bytes
        self._loaded: OrderedDict[str, Loaded] = OrderedDict()  # the last one was used last
        self._versions = dict(versions or {})
        self._unusable = dict(unusable or {})
        self._limit = limit

    @property
    def device(self) -> torch.device:
        """Of all models that fit one GPU."""
        return self._device

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """On which any of the models may be."""
        return self._gpus or (self.device,)

    @property
    def names(self) -> list[str]:
        """All models, as they stand in the models file."""
        return list(self._entries)

    def describe(
        self, *, before: Callable[[str], None] = lambda name: None, beside: bool = False
    ) -> list[ModelView]:
        """Build every model that is not known yet, once, and describe it.

        Args:
            before: called with the name of each model that is about to be built.
            beside: whether another process has its models in memory; what does not fit beside
                these stays unknown.

        Returns:
            The descriptions, also of models that cannot be built: those say why.
        """
        found = []
        for name, entry in self._entries.items():
            if name in self._versions or name in self._unusable:
                continue
            before(name)
            try:
                found.append(self._describe(entry))
            except ModelsFileError as error:
                if beside and isinstance(error, WeightsDoNotFit):
                    continue
                log.warning("the model %r cannot be used: %s", name, error)
                self._unusable[name] = str(error)
                found.append(unusable(name, str(error)))
        return found

    def holds(self, name: str) -> bool:
        """Return whether a model is on the device, so that `get` need not load it."""
        return name in self._loaded

    def sizes_bytes(self) -> dict[str, int]:
        """Return how many bytes of weights each model has on the device, by name."""
        return {name: loaded.size_bytes for name, loaded in self._loaded.items()}

    def idle_bytes(self, *, but: str) -> int:
        """Return the bytes of weights on the device that a job on the model `but` does not need."""
        return sum(size for name, size in self.sizes_bytes().items() if name != but)

    def drop_idle(self, *, but: str, wanted_bytes: int) -> list[str]:
        """Drop models that a job does not need, the least recently used first.

        Args:
            but: the model that the job needs.
            wanted_bytes: of weights to be dropped; at least one model is, if there is one.

        Returns:
            The names of those that were dropped.
        """
        dropped: list[str] = []
        dropped_bytes = 0
        for name in [name for name in self._loaded if name != but]:
            if dropped and dropped_bytes >= wanted_bytes:
                break
            dropped_bytes += self._loaded[name].size_bytes
            dropped.append(name)
        self._drop(dropped)
        return dropped

    def _drop(self, names: Sequence[str]) -> None:
        for name in names:
            del self._loaded[name]
        if names:
            gc.unfreeze()  # a model may be part of a cycle that `import_for_jobs` left out
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

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
        if name in self._unusable:
            raise UnusableModel(f"the model {name!r} cannot be used: {self._unusable[name]}")
        loaded = self._get(name)
        current = loaded.version
        if version is not None and not (len(version) >= 8 and current.startswith(version)):
            raise UnknownModel(
                f"expected model {name!r} at version {version}, but the registered one is "
                f"{current}; submit the job again for the version that is registered now"
            )
        return loaded

    def _get(self, name: str) -> Loaded:
        loaded = self._loaded.get(name)
        why = None if loaded is None else why_load_again(loaded.module)
        if why is not None:
            log.warning("loading the model %r again: %s", name, why)
            loaded = None
            self._drop([name])
        if loaded is None:
            loaded = self._loaded[name] = self._load(self._entries[name])
        self._loaded.move_to_end(name)
        return loaded

    def _describe(self, entry: ModelEntry) -> ModelView:
        """Load a model for the first time and look at it on the CPU, before it is on the device."""
        module, version = self._built(entry)
        view = describe_model(entry, module, version=version)
        self._versions[entry.name] = version
        self._loaded[entry.name] = self._placed(entry, module, version)
        return view

    def _load(self, entry: ModelEntry) -> Loaded:
        module, version = self._built(entry)
        expected = self._versions.setdefault(entry.name, version)
        if version != expected:
            raise UnknownModel(
                f"expected model {entry.name!r} to be built again as version {expected}, got "
                f"{version}: its files changed while the worker ran, or its builder draws random "
                f"weights of its own; the box's owner makes the box offer what they are now with "
                f"`gradbox models reload`"
            )
        return self._placed(entry, module, version)

    def _built(self, entry: ModelEntry) -> tuple[nn.Module, str]:
        over = self._gpus_for(entry)
        if over:
            self.drop_idle(but=entry.name, wanted_bytes=sum(self.sizes_bytes().values()))

        def build() -> tuple[nn.Module, str]:
            in_use = [loaded.module for loaded in self._loaded.values()]
            module, code = build_with_code(entry, over=over, in_use=in_use)
            return module, model_version(module, code=code)

        return self._with_room(entry, build)

    def _gpus_for(self, entry: ModelEntry) -> tuple[torch.device, ...]:
        """Return the GPUs over which an entry's model is spread; none if it is on one device.

        Raises:
            ModelsFileError: the device has fewer.
        """
        wanted = entry.gpus_per_device
        if wanted == 1:
            return ()
        if wanted > len(self._gpus):
            raise ModelsFileError(
                f"models.{entry.name}.gpus_per_device: expected a device of {wanted} GPUs, got "
                f"one of {len(self._gpus)}; start the box with `gradbox up --cluster local` on a "
                f"machine that has them (a box that runs has to be started again)"
            )
        return self._gpus[:wanted]

    def _with_room(self, entry: ModelEntry, build: Callable[[], T]) -> T:
        """Call what builds or moves a model, dropping others for as long as it does not fit.

        Raises:
            WeightsDoNotFit: it does not fit where no other model is.
            ModelsFileError: it cannot be built.
        """
        while True:
            try:
                with self._limit():
                    return building(entry, build)
            except WeightsDoNotFit as error:
                if not self.idle_bytes(but=entry.name):
                    raise
                wanted_bytes = error.wanted_bytes
            # Outside the handler, whose traceback holds what was built.
            dropped = self.drop_idle(but=entry.name, wanted_bytes=wanted_bytes)
            log.info("dropped %s, beside which %s does not fit", ", ".join(dropped), entry.name)

    def _placed(self, entry: ModelEntry, module: nn.Module, version: str) -> Loaded:
        num_bytes = size_bytes(module)
        if entry.gpus_per_device == 1:
            self._make_room(num_bytes)
            self._with_room(entry, partial(module.to, self.device))
        log.info("loaded %s (%d bytes) at version %s", entry.name, num_bytes, version)
        return Loaded(
            name=entry.name,
            version=version,
            module=module,
            methods=entry.methods,
            size_bytes=num_bytes,
            devices=model_devices(module) if entry.gpus_per_device > 1 else (self.device,),
        )

    def _make_room(self, wanted_bytes: int) -> None:
        if self._budget_bytes is None:
            return
        over_bytes = sum(self.sizes_bytes().values()) + wanted_bytes - self._budget_bytes
        if over_bytes > 0:
            for name in self.drop_idle(but="", wanted_bytes=over_bytes):
                log.info("dropped %s from %s to make room", name, self.device)
