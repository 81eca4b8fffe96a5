"""The header of a GGUF file, validated. Layout: github.com/ggml-org/ggml/blob/master/docs/gguf.md."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from jaxserve.checkpoint.files import MAX_HEADER_BYTES, file_size
from jaxserve.errors import CheckpointError, shown

_SUPPORTED_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_MAX_ARRAY_ELEMENTS = 1 << 23
"""Largest total over the arrays of a file: a Python list costs up to 16 times the bytes of the array.
The largest vocabularies (262k tokens, scores and types, 515k merges) need 1.3 million."""

_MIN_KEY_VALUE_BYTES = 8 + 4 + 1
_MIN_TENSOR_RECORD_BYTES = 8 + 4 + 8 + 4 + 8

_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS: dict[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
"""numpy dtypes by GGUF value type."""


@dataclass(frozen=True, slots=True)
class GGMLType:
    """Storage of a tensor type: `block_elements` elements in `block_bytes`."""

    code: int
    name: str
    block_elements: int
    block_bytes: int


_TYPES = (
    GGMLType(0, "F32", 1, 4),
    GGMLType(1, "F16", 1, 2),
    GGMLType(30, "BF16", 1, 2),
    GGMLType(2, "Q4_0", 32, 18),
    GGMLType(3, "Q4_1", 32, 20),
    GGMLType(6, "Q5_0", 32, 22),
    GGMLType(7, "Q5_1", 32, 24),
    GGMLType(8, "Q8_0", 32, 34),
    GGMLType(10, "Q2_K", 256, 84),
    GGMLType(11, "Q3_K", 256, 110),
    GGMLType(12, "Q4_K", 256, 144),
    GGMLType(13, "Q5_K", 256, 176),
    GGMLType(14, "Q6_K", 256, 210),
    GGMLType(39, "MXFP4", 32, 17),
    GGMLType(19, "IQ1_S", 256, 50),
    GGMLType(29, "IQ1_M", 256, 56),
    GGMLType(16, "IQ2_XXS", 256, 66),
    GGMLType(17, "IQ2_XS", 256, 74),
    GGMLType(22, "IQ2_S", 256, 82),
    GGMLType(18, "IQ3_XXS", 256, 98),
    GGMLType(21, "IQ3_S", 256, 110),
    GGMLType(20, "IQ4_NL", 32, 18),
    GGMLType(23, "IQ4_XS", 256, 136),
    GGMLType(34, "TQ1_0", 256, 54),
    GGMLType(35, "TQ2_0", 256, 66),
)

GGML_TYPES: dict[int, GGMLType] = {kind.code: kind for kind in _TYPES}
"""Types by their code in a GGUF tensor record."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor as the validated header describes it, under llama.cpp's name."""

    name: str
    shape: tuple[int, ...]
    """Shape in numpy's order, the reverse of ggml's."""
    kind: GGMLType
    offset: int
    """Offset in bytes from the start of the file."""
    num_bytes: int
    file: Path


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Everything before the tensor data."""

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    num_file_bytes: int


def read_header(path: Path) -> GGUFHeader:
    """Parse and validate the header; raise CheckpointError for anything the file has no bytes for."""
    size = file_size(path)
    if size == 0:
        raise CheckpointError(f"{path}: expected a GGUF file, found an empty file")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data, min(len(data), MAX_HEADER_BYTES)).parse()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


class _Parser:
    """A cursor over the header; every read is checked against the bytes left."""

    def __init__(self, path: Path, data: mmap.mmap, limit: int) -> None:
        self._path = path
        self._data = data
        self._limit = limit
        self._position = 0
        self._num_array_elements = 0

    def parse(self) -> GGUFHeader:
        self._check_magic_and_version()
        num_tensors = self._number("<u8", "tensor count")
        num_keys = self._number("<u8", "key count")
        self._check_count("tensor count", num_tensors, _MIN_TENSOR_RECORD_BYTES)
        self._check_count("key count", num_keys, _MIN_KEY_VALUE_BYTES)
        metadata: dict[str, Any] = {}
        for index in range(num_keys):
            key = self._string(f"name of key {index}")
            if key in metadata:
                self._fail(f"key {shown(key)}", "each key once", "a duplicate")
            metadata[key] = self._value(f"key {shown(key)}")
        records = [self._tensor_record(index) for index in range(num_tensors)]
        alignment = self._alignment(metadata)
        data_start = -(-self._position // alignment) * alignment
        return GGUFHeader(metadata, self._place(records, data_start, alignment), len(self._data))

    def _check_magic_and_version(self) -> None:
        magic = bytes(self._take(4, "magic"))
        if magic != b"GGUF":
            self._fail("magic", "b'GGUF'", repr(magic))
        version = self._number("<u4", "version")
        if version not in _SUPPORTED_VERSIONS:
            is_swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in (1, *_SUPPORTED_VERSIONS)
            self._fail("version", "2 or 3, little endian", "a big-endian file" if is_swapped else str(version))

    def _value(self, what: str) -> Any:
        kind = self._number("<u4", f"type of {what}")
        if kind == _ARRAY:
            return self._array(what)
        return self._scalar_reader(kind, what)()

    def _scalar_reader(self, kind: int, what: str) -> Callable[[], Any]:
        if kind == _STRING:
            return lambda: self._string(what)
        if kind == _BOOL:
            return lambda: self._bool(what)
        dtype = _NUMBERS.get(kind)
        if dtype is None:
            self._fail(what, "a value type of GGUF (0 to 12)", str(kind))
        return lambda: self._number(dtype, what)

    def _array(self, what: str) -> list[Any]:
        kind = self._number("<u4", f"element type of {what}")
        count = self._number("<u8", f"length of {what}")
        if kind == _ARRAY:
            self._fail(what, "an array of numbers, bools or strings", "an array of arrays")
        read_one = self._scalar_reader(kind, what)
        dtype = np.dtype(_NUMBERS[kind]) if kind in _NUMBERS else None
        element_bytes = dtype.itemsize if dtype else 8 if kind == _STRING else 1
        self._check_count(f"length of {what}", count, element_bytes)
        self._num_array_elements += count
        if self._num_array_elements > _MAX_ARRAY_ELEMENTS:
            self._fail(what, f"at most {_MAX_ARRAY_ELEMENTS} array elements in the file", str(self._num_array_elements))
        if dtype is not None:
            values: list[Any] = np.frombuffer(self._take(count * element_bytes, what), dtype).tolist()
            return values
        return [read_one() for _ in range(count)]

    def _bool(self, what: str) -> bool:
        value = self._take(1, what)[0]
        if value > 1:
            self._fail(what, "a bool (0 or 1)", str(value))
        return value == 1

    def _string(self, what: str) -> str:
        length = int.from_bytes(self._take(8, what), "little")  # by far the most frequent number
        try:
            return self._take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            self._fail(what, "UTF-8 text", "invalid bytes")

    def _number(self, dtype: str, what: str) -> Any:
        return np.frombuffer(self._take(np.dtype(dtype).itemsize, what), dtype).item()

    def _take(self, length: int, what: str) -> bytes:
        left = self._limit - self._position
        if length > left:
            is_cut = self._limit < len(self._data)
            rest = f"of the {MAX_HEADER_BYTES} bytes a header may have" if is_cut else "in the file"
            self._fail(what, f"{length} bytes", f"{left} left {rest}")
        start = self._position
        self._position += length
        return self._data[start : self._position]

    def _check_count(self, what: str, count: int, min_bytes_each: int) -> None:
        left = self._limit - self._position
        if count * min_bytes_each > left:
            self._fail(what, f"at most {left // min_bytes_each}, all that fit the file", str(count))

    def _tensor_record(self, index: int) -> GGUFTensor:
        name = self._string(f"name of tensor {index}")
        what = f"tensor {shown(name)}"
        num_dimensions = self._number("<u4", f"number of dimensions of {what}")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            self._fail(what, f"1 to {_MAX_DIMENSIONS} dimensions", str(num_dimensions))
        dimensions = [self._number("<u8", f"shape of {what}") for _ in range(num_dimensions)]
        code = self._number("<u4", f"type of {what}")
        offset = self._number("<u8", f"offset of {what}")
        kind = GGML_TYPES.get(code)
        if kind is None:
            names = ", ".join(known.name for known in GGML_TYPES.values())
            self._fail(what, f"one of the types {names}", f"type {code}")
        if min(dimensions) < 1:
            self._fail(what, "dimensions of at least 1", str(dimensions))
        if dimensions[0] % kind.block_elements:
            self._fail(what, f"rows of a multiple of {kind.block_elements} elements ({kind.name})", str(dimensions[0]))
        num_bytes = math.prod(dimensions) // kind.block_elements * kind.block_bytes
        return GGUFTensor(name, tuple(reversed(dimensions)), kind, offset, num_bytes, self._path)

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        is_power_of_two = type(alignment) is int and alignment > 0 and alignment & (alignment - 1) == 0
        if not is_power_of_two or alignment > 1 << 20:
            self._fail("key 'general.alignment'", "a power of two up to 1 MiB", repr(alignment)[:80])
        return int(alignment)

    def _place(self, records: list[GGUFTensor], data_start: int, alignment: int) -> dict[str, GGUFTensor]:
        """Return the tensors with offsets from the start of the file: aligned, inside it, none over another."""
        placed: dict[str, GGUFTensor] = {}
        for record in records:
            what = f"tensor {shown(record.name)}"
            if record.name in placed:
                self._fail(what, "each tensor once", "a duplicate")
            if record.offset % alignment:
                self._fail(what, f"an offset that is a multiple of {alignment}", str(record.offset))
            start = data_start + record.offset
            if start + record.num_bytes > len(self._data):
                found = f"a file of {len(self._data)} bytes"
                self._fail(what, f"bytes {start} to {start + record.num_bytes}", found)
            placed[record.name] = replace(record, offset=start)
        end, last_name = data_start, ""
        for record in sorted(placed.values(), key=lambda record: record.offset):
            if record.offset < end:
                self._fail(
                    f"tensor {shown(record.name)}",
                    f"to start at byte {end} or later, after {shown(last_name)}",
                    str(record.offset),
                )
            end, last_name = record.offset + record.num_bytes, record.name
        return placed

    def _fail(self, what: str, expected: str, found: str) -> NoReturn:
        raise CheckpointError(f"{self._path}: {what}: expected {expected}, found {found}")
