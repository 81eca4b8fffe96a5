"""Readers accept or reject damaged headers; they never crash or allocate the sizes a header claims."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.checkpoint.gguf.file import open_gguf
from jaxserve.checkpoint.safetensors_file import open_safetensors
from jaxserve.errors import CheckpointError
from jaxserve.models.registry import open_model
from tests.unit.checkpoint.checkpoint_files import decoder_metadata, stored, write_gguf, write_safetensors

MAX_PEAK_BYTES = 4_000_000
"""Memory limit: the files have a few kilobytes."""

EXTREMES = (0, 1, 31, 255, (1 << 31) - 1, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 32, (1 << 64) - 1)

edits = st.lists(
    st.one_of(
        st.tuples(st.just("byte"), st.integers(0, 1 << 16), st.integers(0, 255)),
        st.tuples(st.just("number"), st.integers(0, 1 << 16), st.sampled_from(EXTREMES)),
        st.tuples(st.just("cut"), st.integers(0, 1 << 16), st.just(0)),
    ),
    min_size=1,
    max_size=3,
)
seeded = settings(max_examples=150, deadline=None, derandomize=True, database=None)


def edited(original: bytes, changes: list[tuple[str, int, int]], num_header_bytes: int) -> bytes:
    data = bytearray(original)
    for kind, place, value in changes:
        at = place % num_header_bytes
        if kind == "byte":
            data[at : at + 1] = bytes([value])
        elif kind == "number":
            data[at : at + 8] = struct.pack("<Q", value)
        else:
            del data[place % len(original) :]
    return bytes(data)


def check_bounded(read: Callable[[], object]) -> None:
    """Reads it, or refuses it in one line, within bounded memory."""
    message = ""
    tracemalloc.start()
    try:
        read()
    except CheckpointError as error:
        message = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert "\n" not in message
    assert peak < MAX_PEAK_BYTES


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    values = np.ones((4, 32), np.float32)
    tensors = {
        "token_embd.weight": stored("Q8_0", values),
        "blk.0.attn_q.weight": stored("F16", np.ones((32, 32), np.float32)),
        "output_norm.weight": stored("F32", values[0]),
    }
    metadata = decoder_metadata("llama", block_count=1) | {"a.texts": ["x", "yy"], "a.flags": [True], "a.flag": False}
    path = write_gguf(tmp_path_factory.mktemp("fuzz") / "a.gguf", "llama", metadata, tensors)
    for tensor in open_gguf(path).tensors:
        open_gguf(path).read(tensor)
    return path


@pytest.fixture(scope="module")
def gguf_bytes(gguf_path: Path) -> bytes:
    return gguf_path.read_bytes()


@seeded
@given(changes=edits)
def test_edited_gguf_is_read_or_rejected(
    gguf_path: Path, gguf_bytes: bytes, changes: list[tuple[str, int, int]]
) -> None:
    victim = gguf_path.with_name("victim.gguf")
    num_header_bytes = len(gguf_bytes) - 4 * 34 - 32 * 32 * 2 - 32 * 4 - 32
    victim.write_bytes(edited(gguf_bytes, changes, num_header_bytes))

    def read() -> None:
        file = open_gguf(victim)
        for name in file.tensors:
            file.read(name)
        checkpoint = open_model(victim)
        for name in checkpoint.tensors:
            checkpoint.read(name)

    check_bounded(read)


@pytest.fixture(scope="module")
def safetensors_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors: dict[str, np.ndarray] = {
        "a": np.ones((4, 8), np.float32),
        "b": np.ones(6, np.float16),
        "c": np.zeros((2, 0), np.float32),
    }
    return write_safetensors(tmp_path_factory.mktemp("fuzz") / "a.safetensors", tensors)


@seeded
@given(changes=edits)
def test_edited_safetensors_is_read_or_rejected(safetensors_path: Path, changes: list[tuple[str, int, int]]) -> None:
    victim = safetensors_path.with_name("victim.safetensors")
    original = safetensors_path.read_bytes()
    victim.write_bytes(edited(original, changes, len(original) - 4 * 8 * 4 - 6 * 2))

    def read() -> None:
        file = open_safetensors(victim)
        for name in file.tensors:
            file.read(name)

    check_bounded(read)


@seeded
@given(header=st.binary(max_size=200), data=st.binary(max_size=16))
def test_random_safetensors_header_is_read_or_rejected(safetensors_path: Path, header: bytes, data: bytes) -> None:
    victim = safetensors_path.with_name("victim.safetensors")
    victim.write_bytes(struct.pack("<Q", len(header)) + header + data)
    check_bounded(lambda: open_safetensors(victim))


@seeded
@given(body=st.binary(max_size=300), num_tensors=st.integers(0, 3), num_keys=st.integers(0, 3))
def test_random_gguf_body_is_read_or_rejected(gguf_path: Path, body: bytes, num_tensors: int, num_keys: int) -> None:
    victim = gguf_path.with_name("victim.gguf")
    victim.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + body)
    check_bounded(lambda: open_gguf(victim))
