"""Arrays of an Orbax checkpoint, opened with tensorstore, which needs no jax."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from jaxserve.checkpoint.memory import aligned_empty
from jaxserve.errors import CheckpointError, shown

Driver = Literal["zarr", "zarr3"]
OCDBT_FILE: Final = "manifest.ocdbt"
_CACHE_BYTES: Final = 8 << 20
"""Cache for the nodes of OCDBT's tree, which has the places of all arrays."""


class ZarrArrays:
    """Opens the arrays in one folder: in an OCDBT database, or each in a folder of its own."""

    def __init__(self, folder: Path, driver: Driver) -> None:
        import tensorstore  # here: 0.4 s that other checkpoints need not spend

        self.folder = folder
        self.has_ocdbt = (folder / OCDBT_FILE).is_file()
        self._driver = driver
        self._tensorstore = tensorstore
        self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})

    def open(self, path: str) -> Any:
        """Return tensorstore's TensorStore of an array, which has read its header. Raises CheckpointError in one line."""
        where: dict[str, Any] = {"driver": "file", "path": f"{self.folder.resolve() / path}/"}
        if self.has_ocdbt:
            base = {"driver": "file", "path": f"{self.folder.resolve()}/"}
            where = {"driver": "ocdbt", "base": base, "path": f"{path}/"}
        spec = {"driver": self._driver, "kvstore": where}
        try:
            return self._tensorstore.open(spec, read=True, open=True, context=self._context).result()
        except Exception as error:
            raise self.unreadable(path, error) from error

    def start(self, store: Any) -> tuple[np.ndarray, Any]:
        """Start to read an array, or a part of it, into new memory that a CPU device can keep.

        Returns the memory, and a future that ends when it is filled.
        """
        array = aligned_empty(tuple(store.shape), np.dtype(store.dtype.numpy_dtype))
        return array, self._tensorstore.array(array, copy=False, context=self._context).write(store)

    def unreadable(self, path: str, error: Exception) -> CheckpointError:
        """Return the one-line error for an array that tensorstore cannot read: its errors are of many kinds."""
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        return CheckpointError(f"{self.folder}: array {shown(path)}: cannot be read: {reason[:200]}")
