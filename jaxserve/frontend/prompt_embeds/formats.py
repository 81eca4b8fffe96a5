"""Reads one tensor from the bytes of a file: safetensors, .npy, or the zip archive that `torch.save` writes.

Nothing in a file is executed. The pickle inside torch's archive is compared with the only opcodes that `torch.save` writes for
a contiguous tensor on a CPU; no unpickler runs. All sizes are checked against the length of the file before anything is
allocated.
"""

from __future__ import annotations

import io
import math
import pickletools
import sys
import zipfile
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

NPY: Final = b"\x93NUMPY"
ZIP: Final = b"PK\x03\x04"
FORMATS: Final = "safetensors, .npy, or what torch.save writes"
TYPES: Final = "float32, float16 or bfloat16"
_MAX_HEADER_BYTES: Final = 1 << 16
_MAX_PICKLE_BYTES: Final = 4096
_MAX_ENTRIES: Final = 16
_BFLOAT16: Final = "bfloat16"
_SAFETENSORS_TYPES: Final = {"F32": "<f4", "F16": "<f2", "BF16": _BFLOAT16}
_MAX_AXES: Final = 8
_STORAGES: Final = {"torch FloatStorage": "<f4", "torch HalfStorage": "<f2", "torch BFloat16Storage": _BFLOAT16}


class TensorError(ValueError):
    """The bytes are no tensor that can be read. The message is the rest of a sentence about the field."""


def read_tensor(data: bytes) -> np.ndarray:
    """Return the tensor of a file as float32. Raises TensorError."""
    if data.startswith(NPY):
        return _read_npy(data)
    if data.startswith(ZIP):
        return _read_torch(data)
    if len(data) > 8 and data[8:9] == b"{":
        return _read_safetensors(data)
    raise TensorError(f"its content is no file of a supported format: send {FORMATS}")


class _Header(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _read_safetensors(data: bytes) -> np.ndarray:
    size = int.from_bytes(data[:8], "little")
    if size > min(len(data) - 8, _MAX_HEADER_BYTES):
        raise TensorError("its safetensors header is damaged")
    try:
        header = msgspec.json.decode(data[8 : 8 + size], type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        if len(header) != 1:
            raise TensorError(f"its safetensors file has {len(header)} tensors, one is expected")
        tensor = msgspec.json.decode(next(iter(header.values())), type=_Header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TensorError(f"its safetensors header is damaged ({error})") from None
    content = memoryview(data)[8 + size :]
    if tensor.data_offsets != (0, len(content)):
        raise TensorError("its safetensors file is truncated, or has more than its tensor")
    return _as_float32(content, _SAFETENSORS_TYPES.get(tensor.dtype), tensor.dtype, tensor.shape)


def _read_npy(data: bytes) -> np.ndarray:
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise TensorError(f"its .npy file is of version {version[0]}.{version[1]}, 1.0 or 2.0 is expected")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(file)
    except TensorError:
        raise
    except Exception as error:  # numpy parses the header as a Python literal, which fails in many ways
        raise TensorError(f"its .npy header is damaged ({type(error).__name__})") from None
    if is_fortran and sum(each > 1 for each in shape) > 1:
        raise TensorError("its .npy array is in Fortran's order: save numpy.ascontiguousarray of it")
    name = dtype.str if dtype.str in ("<f4", "<f2") else None
    return _as_float32(memoryview(data)[file.tell() :], name, dtype.name, shape)


def _read_torch(data: bytes) -> np.ndarray:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            if len(entries) > _MAX_ENTRIES or any(info.compress_type for info in entries.values()):
                raise TensorError("its zip archive is not one that torch.save writes for a tensor")
            if entries["data.pkl"].file_size > _MAX_PICKLE_BYTES:
                raise TensorError("its zip archive holds more than a tensor")
            order = archive.read(entries["byteorder"]) if "byteorder" in entries else sys.byteorder.encode()
            pickled, content = archive.read(entries["data.pkl"]), archive.read(entries["data/0"])
    except KeyError as error:
        raise TensorError(
            f"its zip archive is not one that torch.save writes for a tensor: it has no {error}"
        ) from None
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
        if isinstance(error, TensorError):
            raise
        raise TensorError(f"its zip archive is damaged ({error})") from None
    if order != b"little":
        raise TensorError("its torch tensor is not of little-endian numbers")
    storage, offset, shape, strides = _read_pickled_tensor(pickled)
    if strides != _contiguous(shape):
        raise TensorError("its torch tensor is not contiguous: save tensor.contiguous()")
    dtype = _STORAGES.get(storage)
    itemsize = 2 if dtype != "<f4" else 4
    count = math.prod(shape)
    if not 0 <= offset * itemsize <= len(content) - count * itemsize:
        raise TensorError("its torch tensor is outside of its storage")
    return _as_float32(memoryview(content)[offset * itemsize :][: count * itemsize], dtype, storage, shape)


_HEAD: Final = (
    ("GLOBAL", "torch._utils _rebuild_tensor_v2"),
    ("MARK", None),
    ("MARK", None),
    ("BINUNICODE", "storage"),
)
_TAIL: Final = (
    ("GLOBAL", "collections OrderedDict"),
    ("EMPTY_TUPLE", None),
    ("REDUCE", None),
    ("TUPLE", None),
    ("REDUCE", None),
    ("STOP", None),
)
_INTEGERS: Final = ("BININT", "BININT1", "BININT2", "LONG1")
_TUPLES: Final = {"TUPLE2": 2, "TUPLE3": 3}


def _read_pickled_tensor(data: bytes) -> tuple[str, int, tuple[int, ...], tuple[int, ...]]:
    """Return storage type, offset, shape and strides of the tensor whose opcodes, and nothing else, are in a pickle.

    Raises TensorError for any other opcode, constant or order.
    """
    try:
        listed = [(code.name, value) for code, value, _ in pickletools.genops(data)]
    except Exception as error:  # `genops` raises ValueError and errors of decoding; it executes nothing
        raise TensorError(f"its torch pickle is damaged ({type(error).__name__})") from None
    codes = [each for each in listed if each[0] not in ("BINPUT", "LONG_BINPUT", "MEMOIZE", "PROTO", "FRAME")]
    wrong = TensorError(
        "its torch file holds something else than one plain tensor: save tensor.detach().cpu().contiguous()"
    )
    # storage type, key, device, count, TUPLE, BINPERSID, offset
    middle = codes[len(_HEAD) : -len(_TAIL)]
    if tuple(codes[: len(_HEAD)]) != _HEAD or tuple(codes[-len(_TAIL) :]) != _TAIL or len(middle) < 8:
        raise wrong
    (kind, storage), key, device, count, *close, offset = middle[:7]
    integers = [count, offset]
    sizes, rest = _read_tuple(middle[7:], wrong)
    strides, rest = _read_tuple(rest, wrong)
    is_plain = kind == "GLOBAL" and key == ("BINUNICODE", "0") and device == ("BINUNICODE", "cpu")
    if not isinstance(offset[1], int):
        raise wrong
    is_closed = close == [("TUPLE", None), ("BINPERSID", None)] and rest in ([("NEWFALSE", None)], [("NEWTRUE", None)])
    if not (is_plain and is_closed and all(name in _INTEGERS for name, _ in integers)):
        raise wrong
    return str(storage), offset[1], sizes, strides


def _read_tuple(codes: Sequence[tuple[str, Any]], wrong: TensorError) -> tuple[tuple[int, ...], list[tuple[str, Any]]]:
    """Return a tuple of integers at the start of `codes`, and the codes after it."""
    count = next((i for i, (name, _) in enumerate(codes) if name not in _INTEGERS), 0)
    if not count or _TUPLES.get(codes[count][0]) != count:
        raise wrong
    return tuple(int(value) for _, value in codes[:count]), list(codes[count + 1 :])


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _as_float32(content: memoryview, dtype: str | None, name: str, shape: Sequence[int]) -> np.ndarray:
    """Return the numbers of `content` in this shape. Raises TensorError for other types and lengths."""
    if dtype is None:
        raise TensorError(f"its numbers must be {TYPES}, got {name[:64]}")
    stored = np.dtype("<u2" if dtype == _BFLOAT16 else dtype)
    is_array = len(shape) <= _MAX_AXES and all(0 <= size < 1 << 31 for size in shape)
    if not is_array or math.prod(shape) * stored.itemsize != len(content):
        raise TensorError(f"its shape {list(shape)[:8]} does not fit its {len(content)} bytes")
    values = np.frombuffer(content, stored).reshape(tuple(shape))
    if dtype == _BFLOAT16:
        return (values.astype("<u4") << 16).view("<f4")
    return values.astype("<f4")
