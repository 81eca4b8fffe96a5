"""Safetensors files: read with the header checked before anything is allocated and tensors as views of the file, or in memory;
written.

The format is an 8-byte length, a JSON header and the data. Every byte of the data belongs to exactly one tensor.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn, Protocol

import ml_dtypes
import numpy as np

from jaxserve.checkpoint.files import MAX_HEADER_BYTES, file_size, map_array, parse_object
from jaxserve.errors import CheckpointError, shown

_LENGTH_BYTES = 8
_MAX_DIMENSIONS = 8

_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "BOOL": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1,
}  # fmt: skip
"""Types that a header may name. A file may carry tensors that are not read, such as an index buffer."""

_READABLE_DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I8": np.dtype(np.int8),
    "I16": np.dtype("<i2"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "U8": np.dtype(np.uint8),
}
_NAMES: Final = {dtype: name for name, dtype in _READABLE_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """A tensor as the validated header describes it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """"F32", "BF16", ..."""
    offset: int
    """Bytes from the start of the file."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """An opened safetensors file. Holds no descriptor and no mapping between reads."""

    path: Path
    tensors: Mapping[str, SafetensorsTensor]
    num_file_bytes: int
    content: bytes | None = field(default=None, repr=False)
    """All bytes of the file as they were when it was opened; None: tensors are read from the file."""

    def read(self, name: str) -> np.ndarray:
        """Return a tensor in F32, F16, BF16, F8_E4M3, F8_E8M0, U8 or signed integers: a read-only view of the file, or of its bytes in memory."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{self.path}: tensor {shown(name)}: expected to be in the file, found none")
        dtype = _READABLE_DTYPES.get(tensor.dtype)
        if dtype is None:
            expected = ", ".join(_READABLE_DTYPES)
            raise CheckpointError(
                f"{self.path}: tensor {shown(name)}: expected one of the types {expected}, found {tensor.dtype}"
            )
        if self.content is not None and tensor.num_bytes:
            count = math.prod(tensor.shape)
            return np.frombuffer(self.content, dtype, count, tensor.offset).reshape(tensor.shape)
        return map_array(self.path, dtype, tensor.shape, offset=tensor.offset, expected_file_size=self.num_file_bytes)


def open_safetensors(path: Path, *, in_memory: bool = False) -> SafetensorsFile:
    """Open and validate a safetensors file; raise CheckpointError in one line.

    in_memory: read all of it now and nothing later, so that the file may change or vanish.
    """
    num_file_bytes, content = file_size(path), None
    try:
        with path.open("rb") as file:
            if in_memory:
                content = file.read()
                num_file_bytes = len(content)
            header_bytes = _read_header(path, file if content is None else io.BytesIO(content), num_file_bytes)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    data_start = _LENGTH_BYTES + len(header_bytes)
    header = parse_object(header_bytes, f"{path}: header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _fail(path, "'__metadata__'", "an object of strings", type(metadata).__name__)
    tensors = sorted(
        (_tensor(path, name, entry, data_start) for name, entry in header.items()),
        key=lambda tensor: (tensor.offset, tensor.num_bytes),
    )
    end = data_start
    for tensor in tensors:
        if tensor.offset != end:
            _fail(
                path,
                f"tensor {shown(tensor.name)}",
                f"to start at data byte {end - data_start}, where the one before it ends",
                str(tensor.offset - data_start),
            )
        end += tensor.num_bytes
        if end > num_file_bytes:
            _fail(path, f"tensor {shown(tensor.name)}", f"a file of at least {end} bytes", f"{num_file_bytes}")
    if end != num_file_bytes:
        _fail(path, "data", f"a file of {end} bytes, as the header describes", str(num_file_bytes))
    return SafetensorsFile(path, {tensor.name: tensor for tensor in tensors}, num_file_bytes, content)


class ArrayLike(Protocol):
    """An array of any library that numpy can read, such as `jax.Array`: only its description is needed at first."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...


def write_safetensors(path: Path, tensors: Mapping[str, ArrayLike]) -> int:
    """Write tensors to a new file, one after the other: of an array on a device, one copy at a time is in host memory.

    Returns the bytes of the file. Raises CheckpointError naming the tensor for a dtype that no reader takes, and OSError.
    """
    header, end = dict[str, Any](), 0
    for name, tensor in tensors.items():
        dtype = np.dtype(tensor.dtype)
        if dtype not in _NAMES:
            raise CheckpointError(
                f"tensor {shown(name)}: expected one of the types {', '.join(_NAMES.values())}, found {dtype}"
            )
        start, end = end, end + math.prod(tensor.shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % _LENGTH_BYTES)
    with path.open("xb") as file:
        file.write(len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
    return _LENGTH_BYTES + len(encoded) + end


def _read_header(path: Path, file: BinaryIO, num_file_bytes: int) -> bytes:
    if num_file_bytes < _LENGTH_BYTES:
        _fail(path, "header", f"at least {_LENGTH_BYTES} bytes", f"{num_file_bytes} in the file")
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    most = min(MAX_HEADER_BYTES, num_file_bytes - _LENGTH_BYTES)
    if length > most:
        _fail(path, "header length", f"at most {most}", str(length))
    return file.read(length)


def _tensor(path: Path, name: str, entry: Any, data_start: int) -> SafetensorsTensor:
    what = f"tensor {shown(name)}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        found = ", ".join(map(shown, list(entry)[:8])) if isinstance(entry, dict) else type(entry).__name__
        _fail(path, what, "dtype, shape and data_offsets", found or "nothing")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        _fail(path, what, f"one of the types {', '.join(_ITEM_BYTES)}", shown(str(dtype)))
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        _fail(path, what, f"a shape of up to {_MAX_DIMENSIONS} whole numbers", shown(str(shape)))
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _fail(path, what, "data_offsets of two ascending whole numbers", shown(str(offsets)))
    num_bytes = offsets[1] - offsets[0]
    expected = math.prod(shape) * _ITEM_BYTES[dtype]
    if num_bytes != expected:
        _fail(path, what, f"{expected} bytes for shape {shape} of {dtype}", str(num_bytes))
    return SafetensorsTensor(name, tuple(shape), dtype, data_start + offsets[0], num_bytes)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 63 for size in value)


def _fail(path: Path, what: str, expected: str, found: str) -> NoReturn:
    raise CheckpointError(f"{path}: {what}: expected {expected}, found {found}")
