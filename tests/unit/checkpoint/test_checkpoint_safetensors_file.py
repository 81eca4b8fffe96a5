"""The safetensors reader returns the stored bytes and trusts no header."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.checkpoint import safetensors_file as writer
from jaxserve.checkpoint.safetensors_file import open_safetensors
from jaxserve.errors import CheckpointError
from tests.unit.checkpoint.checkpoint_files import raw_safetensors, write_safetensors


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_float_types_are_read_as_stored(tmp_path: Path, dtype: type) -> None:
    random = np.random.default_rng(1)
    tensors: dict[str, np.ndarray] = {
        "a": random.standard_normal((3, 5)).astype(dtype),
        "b": random.standard_normal(7).astype(dtype),
        "scalar": np.array(1.5, dtype),
        "empty": np.zeros((0, 4), dtype),
    }
    file = open_safetensors(write_safetensors(tmp_path / "model.safetensors", tensors))
    assert set(file.tensors) == set(tensors)
    for name, expected in tensors.items():
        read = file.read(name)
        assert (read.dtype, read.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(read, expected)


def test_written_files_are_read_by_the_safetensors_package(tmp_path: Path) -> None:
    """Arrays of any order and library are written as they are, and never over a file."""
    tensors = {
        "whole": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3),
        "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "scalar": np.array(1.5, np.float16),
        "empty": np.zeros((0, 4), np.int8),
    }
    path = tmp_path / "model.safetensors"
    assert writer.write_safetensors(path, tensors) == path.stat().st_size
    found, ours = load_file(path), open_safetensors(path)
    assert found.keys() == tensors.keys()
    for name, expected in tensors.items():
        for read in (found[name], ours.read(name)):
            assert (read.dtype, read.shape) == (expected.dtype, expected.shape)
            np.testing.assert_array_equal(read, np.asarray(expected))
    with pytest.raises(FileExistsError):
        writer.write_safetensors(path, {})
    with pytest.raises(CheckpointError, match=r"tensor 'a': expected one of the types .*, found float64"):
        writer.write_safetensors(tmp_path / "other", {"a": np.zeros(3)})


def test_files_of_the_safetensors_package_are_read(tmp_path: Path) -> None:
    tensors: dict[str, np.ndarray] = {
        "z": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.arange(4, dtype=np.float16),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    file = open_safetensors(tmp_path / "model.safetensors")
    for name, expected in tensors.items():
        np.testing.assert_array_equal(file.read(name), expected)


def test_mapping_ends_with_the_array(tmp_path: Path) -> None:
    file = open_safetensors(write_safetensors(tmp_path / "model.safetensors", {"a": np.ones(5000, np.float32)}))
    maps = Path("/proc/self/maps")
    read = file.read("a")
    assert str(file.path) in maps.read_text()
    assert not read.flags.writeable
    del read
    assert str(file.path) not in maps.read_text()


def tensor(start: int, stop: int, shape: tuple[int, ...], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


TWICE = b'{"w":' + json.dumps(tensor(0, 4, (1,))).encode() + b',"w":' + json.dumps(tensor(0, 4, (1,))).encode() + b"}"
TYPES = "F64, F32, F16, BF16, F8_E4M3, F8_E5M2, F8_E8M0, BOOL, I64, I32, I16, I8, U64, U32, U16, U8"

DAMAGED = {
    "empty": (b"", "header: expected at least 8 bytes, found 0 in the file"),
    "header length": (
        raw_safetensors({}, length=(1 << 64) - 1),
        f"header length: expected at most 2, found {(1 << 64) - 1}",
    ),
    "not JSON": (raw_safetensors(b"{nope}"), "header: expected JSON, found Expecting property name"),
    "not UTF-8": (raw_safetensors(b'{"\xff":1}'), "header: expected JSON, found bytes that are not UTF-8"),
    "deep": (raw_safetensors(b'{"w":' + b"[" * 100_000), "header: expected JSON, found too deep nesting"),
    "huge number": (raw_safetensors(b'{"w":' + b"1" * 5000 + b"}"), "header: expected JSON, found Exceeds the limit"),
    "not an object": (raw_safetensors([1]), "header: expected a JSON object, found list"),
    "duplicate": (raw_safetensors(TWICE, bytes(4)), "header: key 'w': expected each key once, found a duplicate"),
    "metadata": (
        raw_safetensors({"__metadata__": {"a": 1}}),
        "'__metadata__': expected an object of strings, found dict",
    ),
    "entry": (raw_safetensors({"w": 3}), "tensor 'w': expected dtype, shape and data_offsets, found int"),
    "entry keys": (
        raw_safetensors({"w": {"dtype": "F32", "shape": [1]}}),
        "tensor 'w': expected dtype, shape and data_offsets, found 'dtype', 'shape'",
    ),
    "dtype": (
        raw_safetensors({"w": tensor(0, 4, (1,), "F31")}, bytes(4)),
        f"tensor 'w': expected one of the types {TYPES}, found 'F31'",
    ),
    "negative shape": (
        raw_safetensors({"w": tensor(0, 4, (-1, -1))}, bytes(4)),
        "tensor 'w': expected a shape of up to 8 whole numbers, found '[-1, -1]'",
    ),
    "boolean shape": (
        raw_safetensors({"w": tensor(0, 4, (True,))}, bytes(4)),
        "tensor 'w': expected a shape of up to 8 whole numbers, found '[True]'",
    ),
    "backward offsets": (
        raw_safetensors({"w": tensor(4, 0, (1,))}, bytes(4)),
        "tensor 'w': expected data_offsets of two ascending whole numbers, found '[4, 0]'",
    ),
    "size": (
        raw_safetensors({"w": tensor(0, 8, (3,))}, bytes(8)),
        "tensor 'w': expected 12 bytes for shape [3] of F32, found 8",
    ),
    "overflowing shape": (
        raw_safetensors({"w": tensor(0, 0, (1 << 62, 4))}),
        f"tensor 'w': expected {1 << 66} bytes for shape [{1 << 62}, 4] of F32, found 0",
    ),
    "hole": (
        raw_safetensors({"a": tensor(0, 4, (1,)), "b": tensor(8, 12, (1,))}, bytes(12)),
        "tensor 'b': expected to start at data byte 4, where the one before it ends, found 8",
    ),
    "overlap": (
        raw_safetensors({"a": tensor(0, 8, (2,)), "b": tensor(4, 12, (2,))}, bytes(12)),
        "tensor 'b': expected to start at data byte 8, where the one before it ends, found 4",
    ),
    "truncated": (
        raw_safetensors({"w": tensor(0, 4, (1,))}, bytes(3)),
        "tensor 'w': expected a file of at least 73 bytes, found 72",
    ),
    "trailing": (
        raw_safetensors({"w": tensor(0, 4, (1,))}, bytes(5)),
        "data: expected a file of 73 bytes, as the header describes, found 74",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_named_in_one_line(tmp_path: Path, case: str) -> None:
    data, message = DAMAGED[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        open_safetensors(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: {message}")
    assert "\n" not in text


def test_header_is_limited_to_100_mb(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((100_000_001).to_bytes(8, "little"))
    with path.open("r+b") as file:
        file.truncate(200_000_000)  # sparse
    with pytest.raises(CheckpointError, match="header length: expected at most 100000000, found 100000001"):
        open_safetensors(path)


def test_unreadable_types_are_accepted_until_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw_safetensors({"ids": tensor(0, 8, (1,), "U64")}, bytes(8)))
    file = open_safetensors(path)
    with pytest.raises(
        CheckpointError,
        match="tensor 'ids': expected one of the types F32, F16, BF16, F8_E4M3, F8_E8M0, I8, I16, I32, I64, U8, found U64",
    ):
        file.read("ids")


def test_file_truncated_after_opening_is_an_error_not_a_crash(tmp_path: Path) -> None:
    file = open_safetensors(write_safetensors(tmp_path / "model.safetensors", {"a": np.ones(5000, np.float32)}))
    file.path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"changed while it was being read: expected \d+ bytes, found 0"):
        file.read("a")
