"""The GGUF reader decodes every type and trusts no header."""

from __future__ import annotations

import gc
import struct
import tracemalloc
from pathlib import Path
from unittest import mock

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxserve.checkpoint.gguf.file import open_gguf
from jaxserve.checkpoint.gguf.header import GGML_TYPES
from jaxserve.errors import CheckpointError
from tests.unit.checkpoint.checkpoint_files import (
    gguf_string,
    raw_gguf,
    smollm2_file,
    stored,
    tensor_record,
    write_gguf,
)

LEGACY_QUANTS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
I_QUANTS = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS")
TERNARY = ("TQ1_0", "TQ2_0")
QUANTS = (*LEGACY_QUANTS, *K_QUANTS, *I_QUANTS, *TERNARY)


@pytest.fixture
def values() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((6, 512), dtype=np.float32)


def test_type_table_agrees_with_the_gguf_package() -> None:
    assert {kind.name for kind in GGML_TYPES.values()} == {"F32", "F16", "BF16", "MXFP4", *QUANTS}
    for code, kind in GGML_TYPES.items():
        assert GGMLQuantizationType(code).name == kind.name
        assert GGML_QUANT_SIZES[GGMLQuantizationType(code)] == (kind.block_elements, kind.block_bytes)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F32", np.float32), ("F16", np.float16), ("BF16", ml_dtypes.bfloat16)], ids=str
)
def test_float_types_are_read_as_stored(tmp_path: Path, values: np.ndarray, kind: str, dtype: type) -> None:
    file = open_gguf(write_gguf(tmp_path / "a.gguf", "llama", {}, {"w": stored(kind, values)}))
    read = file.read("w")
    assert read.dtype == dtype
    assert not read.flags.writeable
    np.testing.assert_array_equal(read, values.astype(dtype))


@pytest.mark.parametrize("kind", LEGACY_QUANTS)
def test_quantised_types_are_near_what_was_written(tmp_path: Path, values: np.ndarray, kind: str) -> None:
    file = open_gguf(write_gguf(tmp_path / "a.gguf", "llama", {}, {"w": stored(kind, values)}))
    read = file.read("w")
    assert (read.dtype, read.shape) == (values.dtype, values.shape)
    step = 7 / 2 ** (int(kind[1]) - 1)  # random values span about -3.5 to 3.5
    assert np.abs(read - values).max() < step
    whole = gguf.quants.dequantize(stored(kind, values)[1], GGMLQuantizationType[kind])
    np.testing.assert_array_equal(read, whole)


@pytest.mark.parametrize("kind", QUANTS)
def test_chunked_dequantisation_equals_the_whole(tmp_path: Path, kind: str) -> None:
    """Over several chunks with a ragged last one, from random blocks with sane scales."""
    size = next(size for size in GGML_TYPES.values() if size.name == kind)
    num_rows, num_columns = 700, 1024
    random = np.random.default_rng(2)
    blocks = random.integers(0, 256, (num_rows * num_columns // size.block_elements, size.block_bytes), dtype=np.uint8)
    for at in scale_positions(kind):
        scales = random.uniform(-0.1, 0.1, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    if kind == "IQ1_M":  # whose scale is in the high bits of the last bytes
        blocks[:, -1] &= 0xBF
    data = blocks.reshape(num_rows, -1)
    file = open_gguf(write_gguf(tmp_path / "a.gguf", "llama", {}, {"w": (kind, data)}))
    assert file.tensors["w"].shape == (num_rows, num_columns)
    expected = gguf.quants.dequantize(data, GGMLQuantizationType[kind])
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(file.read("w"), expected)


def scale_positions(kind: str) -> tuple[int, ...]:
    """Return the byte offsets of a block's float16 scales (and minima)."""
    if kind in I_QUANTS:
        return () if kind == "IQ1_M" else (0,)
    return {
        "Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,), "Q4_1": (0, 2), "Q5_1": (0, 2),
        "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
        "TQ1_0": (52,), "TQ2_0": (64,),
    }[kind]  # fmt: skip


def test_q4_k_block_decodes_as_its_definition_says(tmp_path: Path) -> None:
    """By hand, after ggml's block_q4_K: value = d * scale * q - dmin * minimum, eight groups of 32."""
    random = np.random.default_rng(3)
    scales, minima = random.integers(0, 64, (2, 8))
    quants = random.integers(0, 16, (8, 32))
    packed = np.zeros(12, np.uint8)
    packed[:4] = scales[:4] | (scales[4:] >> 4) << 6
    packed[4:8] = minima[:4] | (minima[4:] >> 4) << 6
    packed[8:] = (scales[4:] & 15) | (minima[4:] & 15) << 4
    nibbles = np.concatenate([quants[group] | quants[group + 1] << 4 for group in (0, 2, 4, 6)]).astype(np.uint8)
    block = np.concatenate([np.array([0.25, 0.5], np.float16).view(np.uint8), packed, nibbles])
    file = open_gguf(write_gguf(tmp_path / "a.gguf", "llama", {}, {"w": ("Q4_K", block.reshape(1, -1))}))
    expected = 0.25 * scales[:, None] * quants - 0.5 * minima[:, None]
    np.testing.assert_array_equal(file.read("w"), expected.reshape(1, 256).astype(np.float32))


def test_nan_scales_are_no_warning(tmp_path: Path) -> None:
    block = np.full((1, 34), 255, np.uint8)
    file = open_gguf(write_gguf(tmp_path / "a.gguf", "llama", {}, {"w": ("Q8_0", block)}))
    assert np.isnan(file.read("w")).all()


def test_metadata_keeps_every_kind_of_value(tmp_path: Path) -> None:
    metadata = {
        "a.bool": True,
        "a.int": 7,
        "a.float": 0.5,
        "a.text": "naïve ▁",
        "a.ints": [1, -2, 3],
        "a.floats": [0.5, -1.5],
        "a.texts": ["x", "", "日本"],
        "a.bools": [True, False],
    }
    file = open_gguf(write_gguf(tmp_path / "a.gguf", "llama", metadata, {}))
    assert file.metadata == {"general.architecture": "llama", **metadata}


def test_version_2_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(raw_gguf(version=2, records=(tensor_record("w", (4, 2)),), num_data_bytes=32))
    assert open_gguf(path).tensors["w"].shape == (2, 4)


def key(name: str, kind: int, value: bytes) -> bytes:
    return gguf_string(name) + struct.pack("<I", kind) + value


def array(kind: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + data


HUGE = (1 << 64) - 1

DAMAGED = {
    "empty": (b"", "expected a GGUF file, found an empty file"),
    "magic": (raw_gguf(magic=b"GGML"), "magic: expected b'GGUF', found b'GGML'"),
    "version": (raw_gguf(version=9), "version: expected 2 or 3, little endian, found 9"),
    "big endian": (raw_gguf(version=3 << 24), "version: expected 2 or 3, little endian, found a big-endian file"),
    "no counts": (b"GGUF\3\0\0\0", "tensor count: expected 8 bytes, found 0 left in the file"),
    "tensor count": (
        raw_gguf(num_tensors=HUGE),
        f"tensor count: expected at most 0, all that fit the file, found {HUGE}",
    ),
    "key count": (raw_gguf(num_keys=1 << 40), f"key count: expected at most 0, all that fit the file, found {1 << 40}"),
    "key length": (
        raw_gguf(keys=(struct.pack("<Q", HUGE) + bytes(40),)),
        f"name of key 0: expected {HUGE} bytes, found 64 left in the file",
    ),
    "key twice": (raw_gguf(keys=(key("a", 7, b"\1"),) * 2), "key 'a': expected each key once, found a duplicate"),
    "value type": (
        raw_gguf(keys=(key("a", 13, bytes(8)),)),
        "key 'a': expected a value type of GGUF (0 to 12), found 13",
    ),
    "bool": (raw_gguf(keys=(key("a", 7, b"\2"),)), "key 'a': expected a bool (0 or 1), found 2"),
    "text": (
        raw_gguf(keys=(key("a", 8, struct.pack("<Q", 2) + b"\xff\xfe"),)),
        "key 'a': expected UTF-8 text, found invalid bytes",
    ),
    "array length": (
        raw_gguf(keys=(key("a", 9, array(4, HUGE, bytes(16))),)),
        f"length of key 'a': expected at most 11, all that fit the file, found {HUGE}",
    ),
    "text array length": (
        raw_gguf(keys=(key("a", 9, array(8, 1 << 61, bytes(16))),)),
        f"length of key 'a': expected at most 5, all that fit the file, found {1 << 61}",
    ),
    "nested array": (
        raw_gguf(keys=(key("a", 9, array(9, 1, bytes(16))),)),
        "key 'a': expected an array of numbers, bools or strings, found an array of arrays",
    ),
    "alignment": (
        raw_gguf(keys=(key("general.alignment", 4, struct.pack("<I", 24)),)),
        "key 'general.alignment': expected a power of two up to 1 MiB, found 24",
    ),
    "no alignment": (
        raw_gguf(keys=(key("general.alignment", 4, bytes(4)),)),
        "key 'general.alignment': expected a power of two up to 1 MiB, found 0",
    ),
    "dimensions": (
        raw_gguf(records=(tensor_record("w", (1,) * 5),)),
        "tensor 'w': expected 1 to 4 dimensions, found 5",
    ),
    "zero dimension": (
        raw_gguf(records=(tensor_record("w", (0, 4)),)),
        "tensor 'w': expected dimensions of at least 1, found [0, 4]",
    ),
    "tensor type": (
        raw_gguf(records=(tensor_record("w", kind=9),)),
        "tensor 'w': expected one of the types F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, "
        "Q6_K, MXFP4, IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ4_NL, IQ4_XS, TQ1_0, TQ2_0, found type 9",
    ),
    "ragged row": (
        raw_gguf(records=(tensor_record("w", (40,), kind=8),)),
        "tensor 'w': expected rows of a multiple of 32 elements (Q8_0), found 40",
    ),
    "overflowing shape": (
        raw_gguf(records=(tensor_record("w", (1 << 32, 1 << 32, 1 << 32, 1 << 32)),)),
        f"tensor 'w': expected bytes 96 to {96 + (1 << 130)}, found a file of 96 bytes",
    ),
    "truncated data": (
        raw_gguf(records=(tensor_record("w", (32,)),), num_data_bytes=127),
        "tensor 'w': expected bytes 64 to 192, found a file of 191 bytes",
    ),
    "offset": (
        raw_gguf(records=(tensor_record("w", offset=HUGE - 31),), num_data_bytes=128),
        f"tensor 'w': expected bytes {64 + HUGE - 31} to {64 + HUGE - 31 + 128}, found a file of 192 bytes",
    ),
    "misaligned": (
        raw_gguf(records=(tensor_record("w", offset=8),), num_data_bytes=160),
        "tensor 'w': expected an offset that is a multiple of 32, found 8",
    ),
    "overlap": (
        raw_gguf(records=(tensor_record("a"), tensor_record("b", offset=96)), num_data_bytes=256),
        "tensor 'b': expected to start at byte 224 or later, after 'a', found 192",
    ),
    "tensor twice": (
        raw_gguf(records=(tensor_record("w"), tensor_record("w", offset=128)), num_data_bytes=256),
        "tensor 'w': expected each tensor once, found a duplicate",
    ),
    "hostile name": (
        raw_gguf(records=(tensor_record("\x1b[2J\n" + "x" * 200, kind=99),)),
        "tensor '\\x1b[2J\\n" + "x" * 75 + "...': expected one of the types",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_named_in_one_line(tmp_path: Path, case: str) -> None:
    data, message = DAMAGED[case]
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        open_gguf(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: {message}")
    assert "\n" not in text


def test_arrays_are_limited_in_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.checkpoint.gguf.header._MAX_ARRAY_ELEMENTS", 5)
    path = write_gguf(tmp_path / "a.gguf", "llama", {"a": [1, 2, 3], "b": ["x", "y", "z"]}, {})
    with pytest.raises(CheckpointError, match="key 'b': expected at most 5 array elements in the file, found 6"):
        open_gguf(path)


def test_header_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.checkpoint.gguf.header.MAX_HEADER_BYTES", 100)
    path = write_gguf(tmp_path / "a.gguf", "llama", {"a": "x" * 200}, {})
    with pytest.raises(CheckpointError, match=r"key 'a': expected 200 bytes, found \d+ left of the 100 bytes a header"):
        open_gguf(path)


def test_missing_file_and_directory_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"a\.gguf: expected a file, found nothing"):
        open_gguf(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match="expected a file, found a directory"):
        open_gguf(tmp_path)


def test_unknown_tensor_is_named(tmp_path: Path) -> None:
    file = open_gguf(write_gguf(tmp_path / "a.gguf", "llama", {}, {}))
    with pytest.raises(CheckpointError, match=r"a\.gguf: tensor 'w': expected to be in the file, found none"):
        file.read("w")


def test_file_truncated_after_opening_is_an_error_not_a_crash(tmp_path: Path, values: np.ndarray) -> None:
    path = write_gguf(tmp_path / "a.gguf", "llama", {}, {"w": ("F32", values)})
    file = open_gguf(path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(CheckpointError, match=r"changed while it was being read: expected \d+ bytes, found 200"):
        file.read("w")


def test_mapping_ends_with_the_array(tmp_path: Path, values: np.ndarray) -> None:
    path = write_gguf(tmp_path / "a.gguf", "llama", {}, {"w": ("F32", values), "q": stored("Q8_0", values)})
    file = open_gguf(path)
    maps = Path("/proc/self/maps")
    read = file.read("w")
    assert str(path) in maps.read_text()
    del read
    quantised = file.read("q")
    gc.collect()
    assert str(path) not in maps.read_text()
    assert quantised.shape == values.shape


def test_dequantising_needs_little_more_than_the_result(tmp_path: Path) -> None:
    blocks = np.zeros((4096, 1024 // 32 * 20), np.uint8)
    file = open_gguf(write_gguf(tmp_path / "a.gguf", "llama", {}, {"w": ("Q4_1", blocks)}))
    file.read("w")  # imports what it needs
    tracemalloc.start()
    try:
        result = file.read("w")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.4 * result.nbytes  # 16 MiB and one chunk's temporaries


def test_blocks_are_dequantised_many_at_a_time(tmp_path: Path) -> None:
    """Eight chunks of 2^18 weights. A call for each few blocks took six seconds of the default model's start."""
    blocks = np.zeros((2048, 1024 // 32 * 20), np.uint8)
    file = open_gguf(write_gguf(tmp_path / "a.gguf", "llama", {}, {"w": ("Q4_1", blocks)}))
    with mock.patch.object(gguf.quants.Q4_1, "dequantize_blocks", wraps=gguf.quants.Q4_1.dequantize_blocks) as calls:
        assert not file.read("w").any()
    assert calls.call_count == 8


@pytest.mark.slow
def test_smollm2_reads_as_the_gguf_package_reads_it() -> None:
    path = smollm2_file()
    file = open_gguf(path)
    reader = gguf.GGUFReader(path)
    assert {name for name in reader.fields if not name.startswith("GGUF.")} == set(file.metadata)
    assert reader.fields["tokenizer.ggml.merges"].contents() == file.metadata["tokenizer.ggml.merges"]
    assert [tensor.name for tensor in reader.tensors] == list(file.tensors)
    for tensor in reader.tensors[:10]:
        mine = file.tensors[tensor.name]
        assert (mine.offset, mine.num_bytes, mine.kind.name) == (
            tensor.data_offset,
            tensor.n_bytes,
            tensor.tensor_type.name,
        )
    name = "blk.3.attn_q.weight"
    expected = next(tensor for tensor in reader.tensors if tensor.name == name)
    np.testing.assert_array_equal(file.read(name), gguf.dequantize(expected.data, expected.tensor_type))
