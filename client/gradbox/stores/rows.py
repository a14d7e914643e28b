"""The rows of a store, read from the box by ranges of bytes, each part compared with checksums."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from gradbox.errors import InvalidInputs
from gradbox.http.connection import Connection
from gradbox.protocol import ResultView, StoreView
from gradbox.results.remote_file import RemoteFile
from gradbox.results.result_files import ResultFile
from gradbox.stores.jobs import Id
from gradbox.tensors.tensor_bytes import is_torch_importable

ROWS: Final = "samples/projection"
Form = Literal["safetensors", "bergson"]
BERGSON_DTYPES: Final = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def ids_in(file: ResultFile) -> list[Id]:
    """Return the ids that a file has, in their order."""
    if "samples/ids" in file.names:
        return [int(one) for one in np.asarray(file.tensor("samples/ids")[()])]
    content = np.asarray(file.tensor("samples/id_bytes")[()]).tobytes()
    ends = [0, *(int(end) for end in np.asarray(file.tensor("samples/id_ends")[()]))]
    return [content[first:last].decode() for first, last in pairwise(ends)]


class RowMatrix(Sequence[Any]):
    """The rows (N, K) of a store: an index or a slice fetches those alone.

    They are torch tensors where torch is installed, else NumPy arrays, of the store's dtype; bf16
    without torch is float32.
    """

    def __init__(self, connection: Connection, path: str, view: StoreView) -> None:
        self._connection, self._path, self._view = connection, path, view
        self._files: list[RemoteFile] = []

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self._view.num_rows, self._view.num_columns or 0

    def __len__(self) -> int:
        return self._view.num_rows

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise InvalidInputs(f"rows: expected a slice without a step, got {index}")
            return self._joined(start, max(start, stop))
        at = range(len(self))[index]
        return self._joined(at, at + 1)[0]

    def files(self) -> list[RemoteFile]:
        """Return the parts of the store."""
        parts = self._view.parts
        for number in range(len(self._files), len(parts)):
            part = parts[number]
            expected = ResultView(sha256=part.sha256, size_bytes=part.size_bytes)
            path = f"{self._path}/parts/{number}"
            self._files.append(RemoteFile(self._connection, path, expected=expected))
        return self._files

    def ids(self) -> list[Id]:
        """Return the ids of all rows, in their order."""
        return [one for file in self.files() for one in ids_in(file)]

    def losses(self) -> Any:
        """Return the losses of all rows, (N,)."""
        found = [np.asarray(file.tensor("samples/loss")[()]) for file in self.files()]
        return np.concatenate(found) if found else np.empty(0, np.float32)

    def save(self, folder: Path, form: Form) -> Path:
        """Write all rows into a new folder: the parts, or what bergson opens."""
        folder.mkdir(parents=True)
        if form == "bergson":
            self._save_for_bergson(folder)
        else:
            for number, file in enumerate(self.files()):
                file.copy_to(folder / f"{number:05}.safetensors")
        (folder / "store.json").write_text(self._view.model_dump_json(indent=2))
        return folder

    def _save_for_bergson(self, folder: Path) -> None:
        """Write the rows one after the other, and what `bergson.data.load_gradients` asks of them.

        Their ids stand beside, in their order.
        """
        with (folder / "gradients.bin").open("wb") as file:
            for part in self.files():
                file.writelines(part.data_of(ROWS))
        info = {
            "attribute_tokens": False,
            "num_items": len(self),
            "num_grads": len(self),
            "grad_sizes": self._view.columns,
            "base_dtype": BERGSON_DTYPES[self._view.dtype],
        }
        (folder / "info.json").write_text(json.dumps(info, indent=2))
        (folder / "ids.json").write_text(json.dumps(self.ids()))

    def _joined(self, start: int, stop: int) -> Any:
        found, first = [], 0
        for part, file in zip(self._view.parts, self.files(), strict=True):
            begin, end = max(start, first), min(stop, first + part.num_rows)
            if begin < end:
                found.append(file.tensor(ROWS)[begin - first : end - first])
            first += part.num_rows
        if len(found) == 1:
            return found[0]
        if not is_torch_importable():
            return np.concatenate(found) if found else np.empty((0, self.shape[1]))
        import torch

        return torch.cat(found) if found else torch.empty(0, self.shape[1])
