"""A job's result: named gradients in a safetensors file, read when they are asked for."""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from pydantic import ValidationError

from gradbox import html
from gradbox.errors import InvalidInputs, InvalidJob, ProtocolError
from gradbox.inputs.shards import natural
from gradbox.printable import printable
from gradbox.protocol import Receipt
from gradbox.results.factors import FACTORS
from gradbox.results.result_files import LocalFile, ResultFile, no_such_tensor
from gradbox.results.row_reductions import FactoredRows, RowReductions
from gradbox.tensors.tensor_bytes import is_torch_importable

if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes

    from gradbox.results.plot import Kind


RECEIPT: Final = "gradbox"
DFDZ: Final = "dfdz"


class Tensors(Mapping[str, Any]):
    """The tensors of one section of a result file, by name.

    They are torch tensors where torch is installed, else NumPy arrays. Torch maps them from the
    file, so that they take memory as they are read; what is written into one stays in this process.
    Those of a small result, which came with its job, lie in memory. Of a result that stays on its
    box they are `LazyTensor`s.
    """

    def __init__(self, file: ResultFile, section: str, *, order: Sequence[str] = ()) -> None:
        """Give those whose names begin with SECTION/, in `order` and then by name, 2 before 10."""
        self._file = file
        self._section = section
        prefix, place = f"{section}/", {name: index for index, name in enumerate(order)}
        found = [name.removeprefix(prefix) for name in file.names if name.startswith(prefix)]
        found.sort(key=lambda name: (place.get(name, len(place)), natural(name)))
        self._names = dict.fromkeys(found)

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise no_such_tensor(name, section=self._section, names=self._names)
        return self._file.tensor(f"{self._section}/{name}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"<{len(self)} tensors: {', '.join([*self][:3])}{', …' if len(self) > 3 else ''}>"


class GradResult(RowReductions):
    """What a job computed: a safetensors file, read lazily.

    Attributes:
        manifest: the receipt: versions, seed, loss, shards, times and memory.
        grads: name → gradient of the parameter's shape, in `named_parameters` order, then those of
            the loss. Where the loss does not reach a parameter it is zeros, and
            `manifest.unreached` has the name. Of a `PerSampleGradient` (B, *shape), of a `Jacobian`
            (B, Y, *shape); where it came as factors, multiplied out as it is indexed. Of a
            `HessianProduct` or an `InverseHessian` (V, *shape).
        buffers: name → the model's buffer after the job, if `returns` asked for buffers.
        loss_buffers: name → a buffer of the loss module after its one call, likewise: what
            `loss.load_state_dict(..., strict=False)` takes.
        outputs: group → Z as the loss saw it, likewise; `GROUP/NAME` where the readout
            gave several.
        cotangents: group → ∂L/∂Z, of the same shape, likewise.
        input_grads: `GROUP/SHARD/ARGUMENT` → ∂L/∂x, of the shard's argument's shape, if `wrt` or
            `returns` asked for inputs; in the order of the shards.
        dfdz: the shards' ∂inner/∂z of a `MixedGradient`, one after the other as `outer` saw them,
            if `returns` asked for it; else None.
    """

    def __init__(self, file: ResultFile) -> None:
        self._file = file
        try:
            self.manifest = Receipt.model_validate_json(file.metadata[RECEIPT])
        except (KeyError, ValidationError) as error:
            raise ProtocolError(
                f"{file}: expected a result file of gradbox, got one that is not "
                f"({type(error).__name__}: {error})"
            ) from None
        self.grads: Mapping[str, Any] = (
            FactoredRows(self)
            if FACTORS in file.metadata
            else Tensors(file, "grads", order=self.manifest.names)
        )
        self.buffers = Tensors(file, "buffers")
        self.loss_buffers = Tensors(file, "loss_buffers")
        self.outputs = Tensors(file, "outputs")
        self.cotangents = Tensors(file, "cotangents")
        self._dfdz = Tensors(file, DFDZ)
        self.input_grads = Tensors(file, "input_grads")

    @property
    def dfdz(self) -> Any:
        return self._dfdz.get(DFDZ)

    @classmethod
    def load(cls, path: str | Path) -> GradResult:
        """Open a result that `save` or `gradbox result` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ProtocolError: it is not a result of gradbox.
        """
        return cls(LocalFile(Path(path)))

    @classmethod
    def owning(cls, path: Path) -> GradResult:
        """Open a result whose folder is removed when the result is no longer used."""
        file = LocalFile(path)
        # The file and not the result, of which there may be copies.
        weakref.finalize(file, _remove, path.parent, maker=os.getpid())
        return cls(file)

    def __repr__(self) -> str:
        loss = "" if self.manifest.loss is None else f" loss {self.manifest.loss:g},"
        return f"<GradResult of job {printable(self.manifest.job)}:{loss} {len(self.grads)} grads>"

    def _repr_html_(self) -> str:
        order = {f"grads/{name}": place for place, name in enumerate(self.manifest.names)}
        stored = sorted(
            self._file.stored.items(), key=lambda item: (order.get(item[0], len(order)), item[0])
        )
        tensors = [(name, html.shape(tensor.shape), tensor.dtype) for name, tensor in stored]
        table = html.listing(("tensor", "shape", "dtype"), tensors, what="tensors")
        return html.described(self.manifest, title=f"GradResult of job {self.manifest.job}") + table

    @property
    def loss(self) -> float:
        """The value of the loss, exactly as it was given.

        Raises:
            InvalidJob: the computation has none.
        """
        if self.manifest.loss is None:
            raise InvalidJob(
                f"expected the result of a job with a loss, got that of a "
                f"{self.manifest.computation}, which has none"
            )
        return self.manifest.loss

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the gradients, in the order in which `flat` lays them out."""
        return tuple(self.grads)

    def numpy(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the gradients as NumPy arrays."""
        return {name: np.asarray(gradient) for name, gradient in self.grads.items()}

    def flat(self) -> Any:
        """Return all gradients as one vector (P,), in the order of `names`.

        Rows of samples come as a matrix: (B, P), or (B, Y, P) of a Jacobian.

        Raises:
            InvalidJob: the result holds no gradients.
        """
        self._check_gradients()
        lead = self._row_dims
        pieces: list[Any] = [x.reshape(*x.shape[:lead], -1) for x in self.grads.values()]
        if not is_torch_importable():
            return np.concatenate(pieces, axis=-1)
        import torch

        return torch.cat(pieces, -1)

    def save(self, path: str | Path) -> None:
        """Write the result file to `path`, whole or not at all."""
        self._file.copy_to(Path(path))

    def plot(self, kind: Kind | None = None, *, ax: Axes | None = None) -> Axes:
        """Draw the result with matplotlib (`pip install 'gradbox[plot]'`), and return the axes.

        Args:
            kind: "layers" draws the norm of the gradient of every module, over all rows where there
                are several; "gram" the inner products of all rows, summed over outputs; "samples"
                the samples with the largest rows. None is what the job's `reduce` asked for, else
                "samples" of a per-sample job and "layers" of any other.
            ax: where to draw; None makes a figure.

        Raises:
            InvalidJob: matplotlib is not installed, or the result does not hold this.
            InvalidInputs: there is no such kind.
        """
        from gradbox.results.plot import plot

        return plot(self, kind, ax)

    def apply_to(self, module: torch.nn.Module, *, strict: bool = True, prefix: str = "") -> None:
        """Add the gradients into `.grad` of a module's parameters, as `backward` would.

        Each is cast to its parameter's dtype and moved to its device. Parameters that do not
        require grad are left alone, as are those without a gradient in this result and those that
        the loss does not reach: their `.grad` stays None, and no optimizer decays them.

        Args:
            strict: refuse gradients of parameters that the module does not have. Those of the loss
                (`loss.…`, `loss_inputs.…`) are passed over either way.
            prefix: take only the gradients whose names begin so, without it: "loss." for the
                module that was the loss.

        Raises:
            InvalidInputs: an unknown name or another shape; nothing was changed.
            InvalidJob: the result holds no gradients, and `strict` is true.
        """
        if strict:
            self._check_gradients()
        unreached = frozenset(self.manifest.unreached)
        add_gradients(module, self.grads, unreached=unreached, strict=strict, prefix=prefix)

    def _check_gradients(self) -> None:
        if not self.grads:
            reduced = f" with reduce={self.manifest.reduce!r}" if self.manifest.reduce else ""
            raise InvalidJob(
                f"expected a result that holds gradients, got that of a "
                f"{self.manifest.computation}{reduced}, which holds none; submit a Gradient with "
                f"'grads' in returns and parameters in wrt, or rows with reduce='none'"
            )


def _remove(folder: Path, *, maker: int) -> None:
    """Remove a result's folder; a process that was forked off its maker leaves it there."""
    if os.getpid() == maker:
        shutil.rmtree(folder, ignore_errors=True)


OF_THE_LOSS: Final = ("loss.", "loss_inputs.", "y.", "inner.", "outer.")


def add_gradients(
    module: torch.nn.Module,
    grads: Mapping[str, Any],
    *,
    unreached: Collection[str] = (),
    strict: bool = True,
    prefix: str = "",
) -> None:
    """Add gradients into `.grad` of a module's parameters.

    Args:
        unreached: the names of gradients that are zeros because no path leads to the parameter:
            `backward` leaves its `.grad` as it is.
        strict: refuse gradients of parameters that the module does not have.
        prefix: take only the gradients whose names begin so, without it.

    Raises:
        InvalidInputs: no module, an unknown name or another shape; nothing was changed.
    """
    if not hasattr(module, "named_parameters"):
        raise InvalidInputs(
            f"expected the nn.Module whose parameters get the gradients, got "
            f"{type(module).__name__}; an optimizer reads them from there in its step"
        )
    gradients: dict[str, Any] = {
        name.removeprefix(prefix): gradient
        for name, gradient in grads.items()
        if name.startswith(prefix)
    }
    # A tied parameter goes by all its names here; the result has one of them.
    parameters = dict(module.named_parameters(remove_duplicate=False))
    unknown = [
        name
        for name in gradients
        if name not in parameters and (prefix or not name.startswith(OF_THE_LOSS))
    ]
    if strict and unknown:
        raise InvalidInputs(
            f"expected gradients of the module's {len(parameters)} parameters, got some of "
            f"others: {_few(unknown)}; pass the same model as the job's, or strict=False"
        )
    wrong = [
        f"{name}: {tuple(gradient.shape)} for a parameter of {tuple(parameters[name].shape)}"
        for name, gradient in gradients.items()
        if name in parameters and gradient.shape != parameters[name].shape
    ]
    if wrong:
        raise InvalidInputs(f"expected gradients of the parameters' shapes: {_few(wrong)}")
    for name, gradient in gradients.items():
        reached = prefix + name not in unreached
        if reached and name in parameters and parameters[name].requires_grad:
            _accumulate(parameters[name], gradient)


def _accumulate(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    if parameter.grad is None:
        # A copy in any case: the result's own tensor must not change with the parameter's.
        parameter.grad = gradient.to(parameter.device, parameter.dtype, copy=True)
    else:
        # In the wider of the two dtypes, then rounded once.
        parameter.grad.add_(gradient.to(parameter.device))


def _few(items: list[str]) -> str:
    return "; ".join(items[:5]) + (f"; and {len(items) - 5} more" if len(items) > 5 else "")
