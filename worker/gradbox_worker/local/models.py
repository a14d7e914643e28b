"""The models of a client without a box: its user's live modules, or those of a models file.

A live module is used where it lies and as it is at each call. Its user may train, move or rebuild
it in between, so it has no version, and nothing that jobs found out of it is used any longer once
it is not the same: its description, and the engine's plans for the rows of samples. What a change
shows in: its architecture as a version has it (`models.version`), the code of its forwards and its
hooks, and which tensors it registers in which shapes. Numbers of parameters are read anew by every
job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gradbox.errors import InvalidJob, UnknownModel, UnusableModel
from gradbox.protocol import ModelView
from gradbox_engine.model.prepared import model_devices
from gradbox_engine.per_sample import forget_plans
from gradbox_engine.torch_private import hooks_on_calls
from gradbox_service.admission.model import unknown_model, version_among
from gradbox_worker.computations.placement import choose_device, gpus_of, memory_bytes
from gradbox_worker.errors import DeviceNotStarted, ModelsFileError
from gradbox_worker.models import read_models_file
from gradbox_worker.models.describe import describe_module
from gradbox_worker.models.models_file import NAME, gpus_of_a_device
from gradbox_worker.models.registry import Loaded, Models, Registry
from gradbox_worker.models.version import architecture


class LocalModels(Protocol):
    """The models of one client."""

    @property
    def names(self) -> Sequence[str]:
        """All of them, in the order in which they were given."""

    def view(self, name: str) -> ModelView:
        """Describe one of them as it is now."""

    def loaded(self, name: str) -> Models:
        """Return what a job on it runs on."""


def local_models(models: Any, *, device: str) -> LocalModels:
    """Return the models that a client was handed.

    Args:
        models: modules by name, or the path of a models file.
        device: where those of a file go.

    Raises:
        InvalidJob: they are neither, or the file or the device cannot be used.
    """
    if isinstance(models, str | Path):
        try:
            return FileModels(Path(models), device=device)
        except (ModelsFileError, DeviceNotStarted) as error:
            raise InvalidJob(str(error)) from error
    if not isinstance(models, Mapping) or not models:
        raise InvalidJob(
            f"models: expected {{name: module}} or the path of a models file, got "
            f"{type(models).__name__} {models!r:.60}"
        )
    for name, module in models.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise InvalidJob(
                f"models: expected names of letters, digits, '.', '_' and '-' (at most 100, the "
                f"first a letter or digit), got {name!r:.120}"
            )
        if not isinstance(module, nn.Module):
            raise InvalidJob(
                f"models[{name!r}]: expected a torch.nn.Module, got {type(module).__name__}"
            )
    return LiveModels(models)


def find(reference: str, models: LocalModels) -> ModelView:
    """Return the model that a job means by NAME or NAME@VERSION, as a service finds it.

    Raises:
        UnknownModel: there is none of that name or version.
        UnusableModel: it cannot be built or used.
    """
    name, _, wanted = reference.partition("@")
    if name not in models.names:
        raise unknown_model(name, sorted(models.names))
    view = models.view(name)
    if wanted and not view.version:
        raise UnknownModel(
            f"model {name!r}: expected no version of a live module, whose numbers may change at "
            f"any time, got {wanted[:16]!r}; leave it out"
        )
    if wanted:
        version_among(name, wanted, [view.version])
    return view


class LiveModels:
    """The modules that a user has in this process."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        """Look at none yet."""
        self._models = {name: LiveModel(name, module) for name, module in modules.items()}

    @property
    def names(self) -> Sequence[str]:
        """All of them."""
        return list(self._models)

    def view(self, name: str) -> ModelView:
        """Describe one as it is now."""
        return self._models[name].view()

    def loaded(self, name: str) -> Models:
        """Return one as jobs use it."""
        return self._models[name]


class LiveModel:
    """One module: the only model on its device, as far as a job can see."""

    def __init__(self, name: str, module: nn.Module) -> None:
        """Look at nothing yet."""
        self._name, self._module = name, module
        self._seen: list[Any] = []
        self._view = ModelView(name=name)
        self._devices = model_devices(module)

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        return self._devices[0]

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Where its tensors lay when it was last described, as it is at the beginning of a job."""
        return self._devices

    def holds(self, name: str) -> bool:
        """Return that it is there."""
        return True

    def idle_bytes(self, *, but: str) -> int:
        """Return that no other model could make room."""
        return 0

    def drop_idle(self, *, but: str, wanted_bytes: int) -> list[str]:
        """Drop nothing."""
        return []

    def get(self, name: str, version: str | None = None) -> Loaded:
        """Return the module itself."""
        return Loaded(
            name=self._name,
            version="",
            module=self._module,
            methods=tuple(self._view.methods),
            size_bytes=self._view.size_bytes,
            devices=self.devices,
        )

    def view(self) -> ModelView:
        """Describe the module as it is now.

        Raises:
            UnusableModel: a parameter has no numbers yet.
        """
        seen = _looks(self._module)
        if seen != self._seen:
            without = [n for n, p in self._module.named_parameters() if is_lazy(p) or p.is_meta]
            if without:
                raise UnusableModel(
                    f"the model {self._name!r} cannot be used: its parameter {without[0]!r} has no "
                    f"numbers yet; give it some, by a first call or on another device than meta"
                )
            forget_plans(self._module)
            methods = _methods(self._module)
            self._view = describe_module(self._name, self._module, methods=methods, version="")
            self._seen, self._devices = seen, model_devices(self._module)
        return self._view


class FileModels:
    """The models of a models file, each built when it is first used."""

    def __init__(self, path: Path, *, device: str) -> None:
        """Read the file.

        Raises:
            ModelsFileError: it cannot be read.
            DeviceNotStarted: there is no such device.
        """
        entries = read_models_file(path)
        on = choose_device(device)
        gpus = gpus_of(on, num_gpus=gpus_of_a_device(entries))
        budget = memory_bytes(*(gpus or (on,))) // 2
        self._registry = Registry(entries, device=on, gpus=gpus, budget_bytes=budget)
        self._views: dict[str, ModelView] = {}

    @property
    def names(self) -> Sequence[str]:
        """All of them."""
        return self._registry.names

    def view(self, name: str) -> ModelView:
        """Describe one, which is built if it has not been.

        Raises:
            UnusableModel: it cannot be.
        """
        if name not in self._views:
            try:
                loaded = self._registry.get(name)
            except ModelsFileError as error:
                raise UnusableModel(f"the model {name!r} cannot be used: {error}") from error
            self._views[name] = describe_module(
                name, loaded.module, methods=loaded.methods, version=loaded.version
            )
        return self._views[name]

    def loaded(self, name: str) -> Models:
        """Return all of them: a job may need room that another takes."""
        return self._registry


def _methods(module: nn.Module) -> list[str]:
    """Return the entry points of a module that nobody restricts: public methods beside torch's."""
    own = [cls for cls in type(module).__mro__ if not f"{cls.__module__}.".startswith("torch.nn.")]
    found = {
        name
        for cls in own
        for name, value in vars(cls).items()
        if isinstance(value, FunctionType)
        and not name.startswith("_")
        and not hasattr(nn.Module, name)
    }
    return ["forward", *sorted(found - {"forward"})]


def _looks(module: nn.Module) -> list[Any]:
    """Return what is equal as long as a module is the same but for its numbers."""
    code: list[Any] = []
    for one in module.modules():
        code.append(getattr(one.forward, "__func__", one.forward))
        code += hooks_on_calls(one)
    named = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    tensors = [(n, id(t), None if is_lazy(t) else t.shape, t.dtype, t.device) for n, t in named]
    return [*architecture(module), *code, *tensors]
