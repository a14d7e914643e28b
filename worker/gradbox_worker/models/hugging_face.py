"""Models of transformers, from a folder or a name of the Hugging Face hub.

What can keep one from being built is looked at in the order in which its owner can mend it: the
folder or the name, the architecture, the file format, the tensors.

    cannot be built because                          the message says
    ───────────────────────────────────────────────  ──────────────────────────────────────────
    no such folder, no config.json in it             what a folder of transformers holds
    no such name on the hub, or a gated one          where to ask for access, and HF_TOKEN
    HF_HUB_OFFLINE=1, or no internet, and no cache   how to bring the files here
    an architecture that transformers does not know  upgrade it, or register a Python function
    pickled weights only (.bin)                      how to convert them
    tensors that do not fit                          which ones
    GPUs that do not hold it all                     to give a device more of them
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from torch import nn

from gradbox.tensors.safetensors_header import other_format
from gradbox_worker.errors import ModelsFileError
from gradbox_worker.exceptions_to_problems import is_out_of_memory
from gradbox_worker.models.models_file import ModelEntry, convert_line
from gradbox_worker.models.packages import package
from gradbox_worker.models.spread import refuse_offloaded, spread_over
from gradbox_worker.models.weight_index import wrong_indices

# Those of from_pretrained's keyword arguments that say which files are meant.
PASSED_ON: Final = ("cache_dir", "local_files_only", "revision", "subfolder", "token")


def build_hf(entry: ModelEntry, *, over: Sequence[torch.device] = ()) -> nn.Module:
    """Build a model of transformers with the weights that its folder holds.

    Args:
        over: the devices over which it is spread; none: the CPU alone.

    Raises:
        ModelsFileError: it cannot be built; see above.
    """
    transformers = package(entry, "transformers")
    kwargs = dict(entry.kwargs)
    if over:
        kwargs |= spread_over(entry, over)
    factory = _auto_class(entry, transformers, kwargs.pop("auto_class", "AutoModel"))
    kwargs.setdefault("dtype", torch.float32)
    may_mismatch = kwargs.pop("ignore_mismatched_sizes", False)
    folder = entry.folder / Path(entry.source).expanduser()
    indexed: Path | None
    if folder.is_dir():
        _check_folder(entry, folder / kwargs.get("subfolder", ""))
        config, indexed = folder / kwargs.get("subfolder", "") / "config.json", folder
    else:
        _refuse_path(entry, folder)
        config, indexed = _download(entry, "config.json"), _folder_of_downloaded_index(entry)
    _check_architecture(entry, transformers, config)
    if indexed is not None and (wrong := wrong_indices(indexed)):
        raise ModelsFileError(f"models.{entry.name}.source: {'; '.join(wrong)}; correct the index")
    transformers.utils.logging.disable_progress_bar()  # a worker's log is not a terminal
    try:
        model, loading = factory.from_pretrained(
            str(folder) if folder.is_dir() else entry.source,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # to say below which they are
            **kwargs,
        )
    except (OSError, ValueError, TypeError, RuntimeError, ImportError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        raise _explained(entry, error) from error
    if not may_mismatch:
        _refuse_misshapen(entry, loading["mismatched_keys"])
    if set(model.state_dict()) <= set(loading["missing_keys"]):
        raise ModelsFileError(
            f"models.{entry.name}.source: expected weights of a {type(model).__name__}, but none "
            f"of their names are its own, such as {_some(loading['unexpected_keys'])}; check that "
            f"config.json and the safetensors files belong together"
        )
    built: nn.Module = model
    if over:
        refuse_offloaded(entry, built, num_devices=len(over))
    return built


def _auto_class(entry: ModelEntry, transformers: Any, name: Any) -> Any:
    factory = getattr(transformers, str(name), None)
    if not str(name).startswith("AutoModel") or factory is None:
        raise ModelsFileError(
            f"models.{entry.name}.kwargs.auto_class: expected a class of transformers such as "
            f"AutoModel or AutoModelForMaskedLM, got {name!r}"
        )
    return factory


def _refuse_path(entry: ModelEntry, folder: Path) -> None:
    """Refuse a source that can only be meant as a path."""
    if folder.is_file() and folder.suffix == ".py":
        raise ModelsFileError(
            f"models.{entry.name}.source: expected a function in {entry.source}, got the file "
            f'alone; write {entry.source}:FUNCTION, with builder = "python"'
        )
    if folder.is_file():
        raise ModelsFileError(
            f"models.{entry.name}.source: expected a folder with config.json and "
            f"model.safetensors, got a file; {convert_line(folder)}"
        )
    if entry.source.startswith((".", "/", "~")) or entry.source.count("/") > 1:
        raise ModelsFileError(
            f"models.{entry.name}.source: expected a folder with config.json and "
            f"model.safetensors, found none at {folder}; or a name of the hub: OWNER/MODEL"
        )


def _check_folder(entry: ModelEntry, folder: Path) -> None:
    where = f"models.{entry.name}.source"
    if not (folder / "config.json").is_file():
        raise ModelsFileError(
            f"{where}: expected a folder of transformers, but {folder} holds no config.json; copy "
            f"what model.save_pretrained(FOLDER) wrote, or register a Python function that builds "
            f"the model, with its weights as a safetensors file"
        )
    if any(folder.rglob("*.safetensors")) or any(folder.glob("*.safetensors.index*.json")):
        return
    pickled = sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.ckpt")])
    held = f"only pickled weights ({pickled[0].name})" if pickled else "no weights"
    fix = (
        f'load it where you trust it and save it again: AutoModel.from_pretrained("{folder}")'
        f'.save_pretrained("{folder}")'
        if pickled
        else "copy model.safetensors to it"
    )
    raise ModelsFileError(f"{where}: expected model.safetensors in {folder}, found {held}; {fix}")


def _check_architecture(entry: ModelEntry, transformers: Any, config: Path) -> None:
    """Refuse what transformers would, in words that say what to do."""
    where = f"models.{entry.name}.source"
    try:
        document = json.loads(config.read_text(encoding="utf-8"))
        model_type, code = document.get("model_type"), document.get("auto_map")
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise ModelsFileError(
            f"{where}: expected {config} to be a JSON object, got {error}"
        ) from None
    if model_type in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        return
    if code:
        raise ModelsFileError(
            f"{where}: expected an architecture that transformers holds, but {model_type!r} is "
            f"code in the model's own folder, which trust_remote_code would run and gradbox never "
            f"does; read that code, keep it beside models.toml, and register a function of it "
            f'with builder = "python"'
        )
    got = f"model_type {model_type!r}" if model_type else "no model_type"
    raise ModelsFileError(
        f"{where}: expected an architecture that transformers {transformers.__version__} knows, "
        f"but {config} says {got}; pip install --upgrade transformers, or register a function "
        f'that builds it with builder = "python"'
    )


def _refuse_misshapen(entry: ModelEntry, mismatched: Any) -> None:
    if mismatched:
        listed = [
            f"{key} (file {tuple(file)}, model {tuple(ours)})" for key, file, ours in mismatched
        ]
        raise ModelsFileError(
            f"models.{entry.name}.source: expected weights of the shapes that config.json "
            f"describes, got {len(listed)} others: {_some(listed)}; check that they belong "
            f"together, or set kwargs.ignore_mismatched_sizes to draw these at random"
        )


def _download(entry: ModelEntry, name: str) -> Path:
    """Fetch a file of a hub model into the cache, or find it there."""
    hub = package(entry, "huggingface_hub")
    given = {key: entry.kwargs[key] for key in PASSED_ON if key in entry.kwargs}
    try:
        return Path(hub.hf_hub_download(entry.source, name, **given))
    except (hub.errors.HfHubHTTPError, hub.errors.HFValidationError, OSError) as error:
        raise _explained(entry, error) from error


def _folder_of_downloaded_index(entry: ModelEntry) -> Path | None:
    """Fetch a hub model's index of weights and return its folder; None if it has no index."""
    variant = f".{entry.kwargs['variant']}" if entry.kwargs.get("variant") else ""
    try:
        return _download(entry, f"model.safetensors.index{variant}.json").parent
    except ModelsFileError:
        return None  # where it is the source that cannot be found, transformers says so


def _explained(entry: ModelEntry, error: BaseException) -> ModelsFileError:
    """Say what an error of transformers or the hub means for the owner of the box."""
    hub = package(entry, "huggingface_hub")
    where, source = f"models.{entry.name}.source", entry.source
    for link in _chain(error):
        match link:
            case hub.errors.GatedRepoError():
                return ModelsFileError(
                    f"{where}: the hub wants a licence accepted before it gives {source!r}: ask "
                    f"for access at https://huggingface.co/{source}, then set HF_TOKEN for the box"
                )
            case hub.errors.RevisionNotFoundError():
                return ModelsFileError(
                    f"{where}: the hub has {source!r}, but not at revision "
                    f"{entry.kwargs.get('revision')!r}; correct kwargs.revision"
                )
            case hub.errors.RepositoryNotFoundError():
                return ModelsFileError(
                    f"{where}: the hub has no model {source!r} that this box may see; check the "
                    f"name, and for a private one set HF_TOKEN for the box"
                )
            case hub.errors.LocalEntryNotFoundError() | hub.errors.OfflineModeIsEnabled():
                return _not_in_cache(entry, hub)
            case hub.errors.EntryNotFoundError():
                return ModelsFileError(
                    f"{where}: {source!r} lacks a file that transformers needs "
                    f"({_first_line(link)}); where it has pickled weights only, load it where you "
                    f"trust it, and register the folder that model.save_pretrained(FOLDER) writes"
                )
            case hub.errors.HFValidationError():
                return ModelsFileError(
                    f"{where}: expected a folder, or a name of the hub (OWNER/MODEL), got "
                    f"{source!r}"
                )
    folder = entry.folder / Path(source).expanduser()
    for path in sorted(folder.glob("*.safetensors")) if isinstance(error, SafetensorError) else ():
        if other := other_format(path):
            return ModelsFileError(f"{where}: expected safetensors files, but {path} is {other}")
    return ModelsFileError(
        f"{where}: transformers cannot build {source!r}: {type(error).__name__}: "
        f"{_first_line(error)}; check kwargs, config.json and the safetensors files"
    )


def _not_in_cache(entry: ModelEntry, hub: Any) -> ModelsFileError:
    offline = hub.constants.HF_HUB_OFFLINE or entry.kwargs.get("local_files_only")
    why = (
        "HF_HUB_OFFLINE=1 keeps the box from downloading it"
        if offline
        else "huggingface.co cannot be reached from here"
    )
    cache = entry.kwargs.get("cache_dir", hub.constants.HF_HUB_CACHE)
    return ModelsFileError(
        f"models.{entry.name}.source: {entry.source!r} is not (whole) in the cache {cache}, and "
        f"{why}; where there is internet run `hf download {entry.source} --local-dir FOLDER`, copy "
        f"the folder to this machine and name it as source"
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


def _some(names: Any) -> str:
    listed = sorted(map(str, names))
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
