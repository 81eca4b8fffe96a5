"""The arrays of an Orbax checkpoint that MaxText saved: found, described and read without jax.

    RUN/config.json, tokenizer.json ...      copied there from the Hugging Face model that was trained
    RUN/1000/items/_METADATA                 names the arrays of step 1000
    RUN/1000/items/manifest.ocdbt, d/        holds them (or one folder per array)

A model is RUN (its newest step), a step, or a folder with `_METADATA`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from jaxserve.checkpoint.files import read_object
from jaxserve.checkpoint.zarr_arrays import OCDBT_FILE, ZarrArrays
from jaxserve.errors import CheckpointError, shown

METADATA: Final = "_METADATA"
ITEMS: Final = "items"
_PARAMS: Final = "params"
_DESCRIPTIONS: Final = ("zarr.json", ".zarray")
_MAX_HELD: Final = 3
"""Arrays that are kept after a read: queries, keys and values of all layers are read for one parameter after another."""


def is_orbax(directory: Path) -> bool:
    """Return True if a folder is an Orbax checkpoint of a trainer, or has one for a step."""
    return _items(directory) is not None


def _items(directory: Path) -> Path | None:
    """Return the folder with the arrays of a checkpoint, or of the newest step of a run; None if there is none."""
    for folder in (directory, directory / ITEMS):
        if (folder / METADATA).is_file():
            return folder
    steps = (path for path in directory.iterdir() if path.name.isdecimal())
    found = [path / ITEMS for path in steps if (path / ITEMS / METADATA).is_file()]
    return max(found, key=lambda path: int(path.parent.name), default=None)


def orbax_files(directory: Path) -> dict[str, Path]:
    """Return the files of a checkpoint, or of the newest step of a run, by their path in the folder with the arrays."""
    items = _items(directory)
    assert items is not None, "an Orbax checkpoint"
    return {str(file.relative_to(items)): file for file in sorted(items.rglob("*")) if file.is_file()}


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array as its header describes it."""

    path: str
    """Name in the checkpoint, with dots: `params.params.decoder.decoder_norm.scale`."""
    shape: tuple[int, ...]
    dtype: np.dtype
    is_by_layer: bool
    """True if no chunk has more than one index of the second axis."""
    store: Any

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


class OrbaxArrays:
    """Reads the parameters of a checkpoint. Arrays whose chunks span layers are read as a whole and kept for a while.

    Several threads may read at a time.
    """

    def __init__(self, directory: Path) -> None:
        """Read the tree and the header of every parameter.

        Raises CheckpointError for a checkpoint without parameters, or one that cannot be read.
        """
        items = _items(directory)
        assert items is not None, "an Orbax checkpoint"
        self.folder = items
        metadata = read_object(items / METADATA)
        self._stores = ZarrArrays(items, "zarr3" if metadata.get("use_zarr3") else "zarr")
        self.arrays: dict[str, StoredArray] = {name: self._open(path) for name, path in self._paths(metadata).items()}
        if not self.arrays:
            raise CheckpointError(f"{items / METADATA}: expected parameters of a model, found none")
        self._held: dict[str, np.ndarray] = {}
        self._lock = threading.Lock()
        """Protects the arrays that are held. No thread has it while it reads."""

    def file_of(self, array: StoredArray) -> Path:
        """Return a file that changes with the content of an array."""
        if self._stores.has_ocdbt:
            return self.folder / OCDBT_FILE
        files = sorted(path for path in (self.folder / array.path).rglob("*") if path.is_file())
        return next((path for path in files if path.name not in _DESCRIPTIONS), self.folder / METADATA)

    def read(self, array: StoredArray, layer: int | None) -> np.ndarray:
        """Return an array, or one index of its second axis."""
        if layer is not None and array.is_by_layer:
            return self._fetch(array, (slice(None), layer))
        with self._lock:
            whole = self._held.pop(array.path, None)
            if whole is None:
                self._make_room()
        if whole is None:
            whole = self._fetch(array, ())
        with self._lock:
            self._make_room()  # another thread may have filled it
            self._held[array.path] = whole
        return whole if layer is None else whole[:, layer]

    def _make_room(self) -> None:
        """Forget the arrays that were read the longest time ago, so that one more can be kept."""
        while len(self._held) >= _MAX_HELD:
            del self._held[next(iter(self._held))]

    def release(self) -> None:
        """Forget the arrays that were kept."""
        with self._lock:
            self._held.clear()

    def _fetch(self, array: StoredArray, index: tuple[Any, ...]) -> np.ndarray:
        try:
            return np.asarray(array.store[index].read().result())
        except Exception as error:  # tensorstore raises errors of many kinds for damaged files
            raise self._stores.unreadable(array.path, error) from error

    def _paths(self, metadata: Mapping[str, Any]) -> dict[str, str]:
        """Return the path of each parameter by its name below the parameters; the optimizer's state is left out."""
        tree = metadata.get("tree_metadata")
        if not isinstance(tree, dict):
            raise CheckpointError(f"{self.folder / METADATA}: expected tree_metadata, found none")
        found = {}
        for entry in tree.values():
            try:
                keys = [str(key["key"]) for key in entry["key_metadata"]]
                is_array = not entry["value_metadata"]["skip_deserialize"]
            except (KeyError, TypeError) as error:
                raise CheckpointError(
                    f"{self.folder / METADATA}: expected keys of the tree, found {shown(str(entry))}"
                ) from error
            if any("/" in key for key in keys):
                raise CheckpointError(
                    f"{self.folder / METADATA}: expected names without slashes, found {shown(str(keys))}"
                )
            if is_array and keys[:1] == [_PARAMS]:
                found[_name(keys)] = ".".join(keys)
        return found

    def _open(self, path: str) -> StoredArray:
        store = self._stores.open(path)
        chunk: tuple[int | None, ...] = store.chunk_layout.read_chunk.shape or ()
        return StoredArray(
            path=path,
            shape=tuple(store.shape),
            dtype=np.dtype(store.dtype.numpy_dtype),
            is_by_layer=len(chunk) > 1 and chunk[1] == 1,
            store=store,
        )


def _name(keys: list[str]) -> str:
    """Return the name of a parameter: without `params` in front, `value` at the end, and with list indices joined to the
    key before them (MaxText's modules of Flax NNX have both)."""
    while keys and keys[0] == _PARAMS:
        keys = keys[1:]
    parts: list[str] = []
    for key in keys:
        if key.isdecimal() and parts:
            parts[-1] += f"_{key}"
        else:
            parts.append(key)
    return ".".join(parts[:-1] if parts and parts[-1] == "value" else parts)
