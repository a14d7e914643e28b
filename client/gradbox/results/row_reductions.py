"""What the rows of a per-sample result are reduced to: on the box, or here from its rows.

Both use `gradbox_factors`, so both give the same. Rows that are stored as factors are never
multiplied out for it.

Shapes: B samples, Y outputs; a per-sample gradient has no dim Y.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from gradbox.errors import InvalidInputs, InvalidJob
from gradbox.protocol import Receipt
from gradbox.protocol.per_sample import ProjectionKind
from gradbox.results.factors import FACTORS, Piece, read_factors
from gradbox.results.result_files import ResultFile, no_such_tensor
from gradbox.tensors.lazy_tensor import LazyTensor, Region
from gradbox.tensors.tensor_bytes import is_tensor, is_torch_importable

if TYPE_CHECKING:
    import torch

    from gradbox_factors import Factored


def read_tangents(tangents: Any, rows: Factored) -> dict[str, torch.Tensor]:
    """Return tangents by parameter name as torch tensors.

    Raises:
        InvalidInputs: they are no dict of real tensors, or a name or a shape is not a parameter's.
    """
    if not isinstance(tangents, Mapping):
        raise InvalidInputs(
            f"tangents: expected {{parameter: tensor}}, got {type(tangents).__name__}"
        )
    read = {name: _real(given, f"tangents[{name!r}]") for name, given in tangents.items()}
    for name, tangent in read.items():
        expected = rows.pieces[0][name].shape if name in rows.names else None
        if expected is None or tuple(tangent.shape) != expected:
            wanted = expected or f"a parameter of this result ({len(rows.names)})"
            raise InvalidInputs(
                f"tangents[{name!r}]: expected {wanted}, got {tuple(tangent.shape)}"
            )
    return read


def read_cotangents(given: Any, rows: Factored, *, one_output: bool) -> torch.Tensor:
    """Return cotangents as a torch tensor of shape (B, Y).

    Raises:
        InvalidInputs: they are no real tensor of shape (B,), (B, Y) or z's.
    """
    cotangents = _real(given, "cotangents")
    expected = (rows.samples, rows.outputs)
    if cotangents.shape[:1] != expected[:1] or cotangents.numel() != expected[0] * expected[1]:
        shape = expected[:1] if one_output else expected
        raise InvalidInputs(
            f"cotangents: expected {shape}, or z's shape, got {tuple(cotangents.shape)}"
        )
    return cotangents.reshape(expected)


def check_projection(dim: Any, seed: Any, kind: Any) -> None:
    """Refuse a projection that the box would refuse too.

    Raises:
        InvalidJob: `dim` or `seed` is no whole number in range, or `kind` names no matrix.
    """
    if not _is_whole(dim) or dim < 1:
        raise InvalidJob(f"dim: expected a whole number from 1, got {dim!r}")
    if not _is_whole(seed) or not 0 <= seed < 2**63:
        raise InvalidJob(f"seed: expected a whole number from 0 to 2⁶³ − 1, got {seed!r}")
    if kind not in get_args(ProjectionKind):
        raise InvalidJob(f"kind: expected one of {get_args(ProjectionKind)}, got {kind!r}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _real(value: Any, where: str) -> torch.Tensor:
    import torch

    if not is_tensor(value):
        raise InvalidInputs(
            f"{where}: expected a torch tensor or a NumPy array, got {type(value).__name__}; "
            f"convert it with torch.as_tensor"
        )
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype.kind not in "fiub":
            raise InvalidInputs(f"{where}: expected real numbers, got {array.dtype}")
        # A copy that torch can hold: in this machine's byte order, with strides of 0 or more.
        value = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))
    if value.is_complex():
        raise InvalidInputs(f"{where}: expected real numbers, got {value.dtype}")
    tensor: torch.Tensor = value.detach()
    return tensor


GRADIENT = "per_sample_gradient"
PER_SAMPLE = (GRADIENT, "jacobian")
CURVATURE = ("hessian_product", "inverse_hessian")  # with a row for each vector


class RowReductions:
    """The rows of a result, reduced.

    Each method returns what the box computed where the job's `reduce` asked for it, and otherwise
    computes it from the rows, which takes torch.
    """

    manifest: Receipt
    grads: Mapping[str, Any]
    _file: ResultFile

    @property
    def losses(self) -> Any:
        """The loss of every sample, shape (B,).

        Raises:
            InvalidJob: the result is not of a `PerSampleGradient`.
        """
        found = self._reduced("loss")
        if found is None:
            raise InvalidJob(
                f"expected the result of a PerSampleGradient, got that of a "
                f"{self.manifest.computation}, which has no loss for each sample"
            )
        return found

    @property
    def against_losses(self) -> Any:
        """The loss of every sample of the group that `against` named, shape (B',); else None."""
        return self._reduced("against_loss")

    def norms(self) -> Any:
        """Return the norm of every row over all parameters, shape (B,) or (B, Y).

        Of a clipped sum they are the norms before clipping.

        Raises:
            InvalidJob: this result has neither rows nor norms.
        """
        found = self._reduced("norm")
        return self._without_outputs(self._rows("norm").norms()) if found is None else found

    def parameter_norms(self) -> dict[str, Any]:
        """Return the norm of every row's part for each parameter, name → (B,) or (B, Y).

        Raises:
            InvalidJob: this result has neither rows nor norms.
        """
        prefix = "norms/"
        stored = [f"{prefix}{name}" for name in self.manifest.names]
        if all(name in self._file.names for name in stored) and stored:
            return {name.removeprefix(prefix): self._file.tensor(name)[()] for name in stored}
        squares = self._rows("norm").squared_norms()
        return {name: self._without_outputs(square.sqrt()) for name, square in squares.items()}

    def gram(self) -> Any:
        """Return the inner products of all rows, shape (B, B) or (B, Y, B, Y).

        Raises:
            InvalidJob: this result has neither rows nor these products.
        """
        found = self._reduced("gram")
        if found is not None:
            return found
        gram = self._rows("gram").gram()
        return gram[:, 0, :, 0] if self._squeezed else gram

    def gram_trace(self) -> Any:
        """Return the inner products summed over outputs, Σ_y J_y J_yᵀ, shape (B, B).

        Raises:
            InvalidJob: this result has neither rows nor these products.
        """
        found = self._reduced("gram_trace")
        if found is not None:
            return found
        whole = self._reduced("gram")
        if whole is not None:
            return whole if self._squeezed else whole.diagonal(0, 1, 3).sum(-1)  # torch or NumPy
        return self._rows("gram_trace").gram(trace=True)

    def jvp(self, tangents: Mapping[str, Any] | None = None) -> Any:
        """Return J v, shape (B,) or (B, Y).

        Args:
            tangents: by parameter name, each of the parameter's shape; zero for what is left out.
                None is those that the box was given with reduce="jvp".

        Raises:
            InvalidJob: this result has no rows, or `tangents` is missing.
            InvalidInputs: a name or a shape is not a parameter's, or they are complex.
        """
        if tangents is None:
            return self._required("jvp", self._reduced("jvp"), "tangents")
        rows = self._rows("jvp")
        return self._without_outputs(rows.jvp(read_tangents(tangents, rows)))

    def vjp(self, cotangents: Any = None) -> dict[str, Any]:
        """Return Jᵀ u by parameter, each of the parameter's shape.

        Args:
            cotangents: shape (B,) of a per-sample gradient, of a Jacobian (B, Y) or z's. None
                is those that the box was given with reduce="vjp".

        Raises:
            InvalidJob: this result has no rows, or `cotangents` is missing.
            InvalidInputs: they have another shape, or are complex.
        """
        if cotangents is None:
            stored = dict(self.grads) if self.manifest.reduce == "vjp" else None
            found: dict[str, Any] = self._required("vjp", stored, "cotangents")
            return found
        rows = self._rows("vjp")
        return rows.vjp(read_cotangents(cotangents, rows, one_output=self._squeezed))

    def projection(
        self,
        dim: int | None = None,
        *,
        seed: int | None = None,
        kind: ProjectionKind | None = None,
    ) -> Any:
        """Return the seeded random projection of every row, shape (B, dim) or (B, Y, dim).

        Of the kind "per_layer" a row has as many numbers as the projections of all parameters.

        The same seed gives the same projection on every box and here.

        Args:
            dim: the numbers a row is projected to. None is what the box was told.
            seed: by default the job's.
            kind: by default the job's, and of a result with rows "sketch".

        Raises:
            InvalidJob: this result has no rows, or is projected already, otherwise; or there is no
                such projection.
        """
        seed = self.manifest.seed if seed is None else seed
        found = self._reduced("projection")
        if found is not None:
            own = self.manifest.projection_kind or "sketch"
            own_dim = self.manifest.projection_dim or found.shape[-1]
            if dim not in (None, own_dim) or seed != self.manifest.seed or kind not in (None, own):
                raise InvalidJob(
                    f"expected the projection of kind {own!r} with dim={own_dim} by the seed "
                    f"{self.manifest.seed}, which is all that this result has, "
                    f"got dim={dim}, seed={seed}, kind={kind!r}; submit a job for that"
                )
            return found
        rows = self._rows("projection")
        kind = "sketch" if kind is None else kind
        check_projection(dim, seed, kind)
        assert dim is not None
        return self._without_outputs(rows.projection(int(dim), int(seed), kind=kind))

    @property
    def _squeezed(self) -> bool:
        return self.manifest.computation in (GRADIENT, *CURVATURE)

    @property
    def _row_dims(self) -> int:
        """The number of dims before a parameter's own in `grads`."""
        computation, reduce = self.manifest.computation, self.manifest.reduce
        if computation not in CURVATURE and (computation not in PER_SAMPLE or reduce != "none"):
            return 0
        return 1 if self._squeezed else 2

    def _without_outputs(self, x: torch.Tensor) -> torch.Tensor:
        return x.squeeze(1) if self._squeezed else x

    def _reduced(self, name: str) -> Any:
        stored = f"samples/{name}"
        return self._file.tensor(stored)[()] if stored in self._file.names else None

    def _required(self, name: str, found: Any, argument: str) -> Any:
        if found is None:
            raise InvalidJob(
                f"{name}: expected {argument}, since the job was not told any with "
                f"reduce={name!r}; got None"
            )
        return found

    def _rows(self, wanted: str) -> Factored:
        if not self._row_dims:
            raise InvalidJob(
                f"expected a result with rows for every sample, or one reduced to {wanted!r}, got "
                f"that of a {self.manifest.computation} with reduce={self.manifest.reduce!r}; "
                f"submit the job with reduce='none' or reduce={wanted!r}"
            )
        return self._factored

    @cached_property
    def _factored(self) -> Factored:
        """The rows as terms: the file's factors, or its arrays.

        Raises:
            InvalidJob: there is no torch on this machine.
        """
        if not is_torch_importable():
            raise InvalidJob(
                "expected torch on this machine to multiply factors out or to reduce rows, found "
                "none: pip install 'gradbox[torch]', or have the box do it, by form='dense' or "
                "reduce="
            )
        if FACTORS in self._file.metadata:
            return read_factors(
                self._file.metadata[FACTORS],
                self._factor,
                stored=self._file.stored,
                names=self.manifest.names,
                samples=self.manifest.samples,
                outputs=self.manifest.outputs,
            )
        from gradbox_factors import Factored

        arrays = {name: lazy[()] for name, lazy in self.grads.items()}
        return Factored.of_arrays(arrays, one_output=self._squeezed)

    def _factor(self, name: str) -> Any:
        return self._file.tensor(name)[()]

    def _rows_of_factors(self, name: str) -> LazyTensor:
        """Return a parameter's rows, made of factors as they are indexed."""
        first = self._factored.pieces[0]
        assert isinstance(first, Piece)
        samples, outputs = self.manifest.samples or 0, self.manifest.outputs or 1
        lead = (samples,) if self._squeezed else (samples, outputs)

        def read(region: Region) -> Any:
            whole = slice(None)
            of_samples = region[0] if region else whole
            of_outputs = region[1] if len(region) > 1 and not self._squeezed else whole
            rows = self._without_outputs(self._factored.block(name, of_samples, of_outputs))
            return rows[(*[whole] * min(len(region), len(lead)), *region[len(lead) :])]

        return LazyTensor(lead + first.shape(name), read, dtype=lambda: first[name].dtype)


class FactoredRows(Mapping[str, Any]):
    """A factored result's rows by parameter, made as they are indexed."""

    def __init__(self, reductions: RowReductions) -> None:
        self._reductions = reductions
        self._names = dict.fromkeys(reductions.manifest.names)

    def __getitem__(self, name: str) -> LazyTensor:
        if name not in self._names:
            raise no_such_tensor(name, section="grads", names=self._names)
        return self._reductions._rows_of_factors(name)

    def __iter__(self) -> Any:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
