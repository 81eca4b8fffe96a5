"""The interface of a quantisation format: how it stores a matrix, quantises, multiplies, and which devices it suits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from jaxserve.quant.array import ArraySpec, MatrixSpec, QuantArray
from jaxserve.quant.tensor import Tensor, as_floats

if TYPE_CHECKING:
    from jaxserve_kernels.backend import Backend

Host = QuantArray[np.ndarray]
"""A matrix in host memory: outputs are the first dimension of every array."""


@dataclass(frozen=True, slots=True)
class Cutting:
    """A way to cut a device's part of a matrix from a checkpoint's quantised tensor, of which no more is read."""

    takes: Callable[[Tensor], bool]
    """True for tensors of which some outputs, and some inputs that are whole blocks or groups, become the same part of the matrix, whatever the
    rest is."""
    outputs_axis: int = 0
    """Axis of the outputs in the values of one matrix on a device."""
    of_share: Format | None = None
    """Format of the part if devices split the inputs; None: that of the matrix."""


class Format(ABC):
    """One way to store weight matrices. A module of `quant/formats/` has one, called `FORMAT`.

    Methods that compute on a device import jax themselves: a process without jax may import every format.
    """

    name: ClassVar[str]
    """The value of `--quantization`: the module's name with dashes."""
    bits: ClassVar[int]
    """Bits of a weight, without scales."""
    largest: ClassVar[float] = 1.0
    """Largest value that a stored number may have."""
    quantizes_activations: ClassVar[bool] = False
    """True if activations are quantised to the dtype of the weights before a matmul, token by token."""
    is_by_row: ClassVar[bool] = False
    """True if outputs are stored one by one, in their order: a part of the outputs is then made from that part of the
    tensor."""
    cutting: Cutting | None = None
    """Way to cut parts of a matrix from a checkpoint's quantised tensors; None: `is_by_row`, or only the whole matrix is read."""
    keeps_blocks: ClassVar[bool] = False
    """True if matrices keep the blocks of a GGUF file: only such files can be served so."""
    only_experts: ClassVar[bool] = False
    """True if only the matrices of experts are quantised: other models cannot be served so."""
    arithmetic: ClassVar[str | None] = None
    """Dtype that a matmul multiplies in, as `planning.devices.Rates` names it. None: that of activations."""

    def __repr__(self) -> str:
        return self.name

    def for_tables(self, *, is_stored: bool) -> Format:
        """Return the format of embedding tables and output heads, whose rows are looked up one by one.

        is_stored: the checkpoint stores its matrices in this format, perhaps tables, too.
        """
        return self

    @abstractmethod
    def values_dtype(self, weights: np.dtype, platform: str) -> np.dtype:
        """Return the dtype of the stored values. weights: dtype of weights that are not quantised."""

    def has_native_matmul(self, weights: np.dtype) -> bool:
        """Return True if the native CPU kernels multiply with all matrices. weights: dtype of those that are not quantised."""
        from jaxserve_kernels.matmul import multiplies

        return multiplies(self.values_dtype(weights, "cpu"), dynamic=self.quantizes_activations)

    @abstractmethod
    def declare(self, spec: MatrixSpec) -> QuantArray[ArraySpec]:
        """Return shapes, dtypes and axes of the arrays on a device; another format's if this one does not fit the matrix."""

    @abstractmethod
    def quantize(self, weights: np.ndarray, declared: QuantArray[ArraySpec]) -> Host:
        """Return a checkpoint's `[out, in]` tensor in this format."""

    @abstractmethod
    def dequantize(self, stored: Host) -> np.ndarray:
        """Return `[out, in]` weights in a float dtype."""

    def keep(self, stored: Host, declared: QuantArray[ArraySpec]) -> Host | None:
        """Return a quantised tensor without rounding it again, or None if its values are not those of this format."""
        return None

    def convert(self, tensor: Tensor, declared: QuantArray[ArraySpec]) -> Host:
        """Return a checkpoint's tensor in this format, as it is stored if possible."""
        kept = self.keep(tensor, declared) if isinstance(tensor, QuantArray) else None
        if kept is not None:
            return kept
        return self.quantize(as_floats(tensor), declared)

    def to_device(self, host: Host) -> Host:
        """Return the arrays in the layout of `declare`."""
        return host

    def random(self, noise: np.ndarray, declared: QuantArray[ArraySpec], deviation: float) -> Host:
        """Return random weights in the layout of `declare`. noise: numbers of deviation 1, of which as many are taken."""
        values, steps = declared.values, self.largest / 3
        numbers = np.clip(np.rint(np.resize(noise, values.shape) * steps), -self.largest, self.largest)
        filled = {"scales": deviation / steps, "offsets": 0.0}
        arrays = {
            name: None if spec is None else np.full(spec.shape, value).astype(spec.dtype)
            for name, value in filled.items()
            for spec in (getattr(declared, name),)
        }
        return QuantArray(self, numbers.astype(values.dtype), **arrays)

    def matmuls(
        self, x: Any, weights: Sequence[QuantArray[Any]], num_rows: Any, backend: Backend, dtype: Any = "float32"
    ) -> list[Any]:
        """Return x @ weight.T of each weight, added in float32 and rounded once. x: `[tokens, in]`; rows after `num_rows` are padding."""
        from jaxserve_kernels.matmul import matmuls

        scales = [weight.scales for weight in weights if weight.scales is not None]
        values, dynamic = [weight.values for weight in weights], self.quantizes_activations
        return matmuls(x, values, scales, num_rows, dynamic=dynamic, backend=backend, dtype=dtype)

    def grouped_matmul(self, x: Any, weight: QuantArray[Any], group_sizes: Any, backend: Backend) -> Any:
        """Return x[r] @ weight[expert of r].T in float32 for rows sorted by expert, `group_sizes` rows of each."""
        from jaxserve_kernels.grouped_matmul import grouped_matmul

        dynamic = self.quantizes_activations
        return grouped_matmul(x, weight.values, group_sizes, weight.scales, dynamic=dynamic, backend=backend)

    def lookup(self, table: QuantArray[Any], rows: Any, dtype: Any, backend: Backend = "reference") -> Any:
        """Return rows of an embedding table, dequantised to `dtype`."""
        found = table.values[rows].astype(dtype)
        return found if table.scales is None else found * table.scales[rows, None].astype(dtype)

    def notes(self, platform: str, capability: tuple[int, int] | None) -> tuple[str, ...]:
        """Return what a user should know of this format on a device. capability: of CUDA devices."""
        return ()
