"""Every format that a scan of the folder finds: its arrays, its rounding, its errors for other checkpoints."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.quant.array import MatrixSpec, QuantArray, array_bytes
from jaxserve.quant.names import format_names
from jaxserve.quant.policy import QuantPolicy
from jaxserve.quant.registry import find_format, read_form

FLOAT32 = np.dtype(np.float32)
SPEC = MatrixSpec(48, 128, ("ffn", "embed"), FLOAT32, FLOAT32, stored_kind="Q8_0")
WEIGHTS = np.random.default_rng(0).standard_normal((48, 128), np.float32)


def test_formats_are_those_of_the_folder_none_first() -> None:
    expected = [
        "none",
        "fp8",
        "fp8-block-weight-only",
        "fp8-weight-only",
        "gguf",
        "gguf-weight-only",
        "int4-weight-only",
        "int8",
        "int8-weight-only",
        "mxfp4-weight-only",
        "nvfp4-weight-only",
    ]
    assert list(format_names()) == expected
    assert find_format("int8") is QuantPolicy("int8").format


@pytest.mark.parametrize("name", format_names())
@pytest.mark.parametrize("has_offsets", [False, True])
def test_a_quantised_matrix_has_the_declared_arrays_and_is_close(name: str, has_offsets: bool) -> None:
    declared = find_format(name).declare(replace(SPEC, has_offsets=has_offsets))
    chosen = declared.format
    made = chosen.convert(WEIGHTS, declared)
    on_device, random = chosen.to_device(made), chosen.random(WEIGHTS.ravel(), declared, 1.0)
    for arrays in (on_device.arrays, random.arrays):
        assert [(each.shape, each.dtype) for each in arrays] == [(each.shape, each.dtype) for each in declared.arrays]
    error = np.abs(made.dequantize() - WEIGHTS)
    assert error.mean() <= np.abs(WEIGHTS).mean() * 2.0 ** (-chosen.bits / 2)


@pytest.mark.parametrize("name", format_names())
def test_a_matrix_stored_in_a_format_is_kept_by_it(name: str) -> None:
    declared = find_format(name).declare(SPEC)
    chosen = declared.format
    stored = chosen.convert(WEIGHTS, declared)
    kept = chosen.convert(stored, declared)
    for found, expected in zip(kept.arrays, stored.arrays, strict=True):
        np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))


def test_rows_of_a_quantised_matrix_are_rows_of_all_arrays() -> None:
    stored = find_format("int4-weight-only").convert(WEIGHTS, find_format("int4-weight-only").declare(SPEC))
    rows = stored[[3, 1]]
    assert isinstance(rows, QuantArray)
    np.testing.assert_array_equal(rows.dequantize(), stored.dequantize()[[3, 1]])


@pytest.mark.parametrize(("dtype", "expected"), [("int4", 8), ("int8", 16), ("float8_e4m3fn", 16), ("bfloat16", 32)])
def test_bytes_of_an_array_count_bits_of_its_values(dtype: str, expected: int) -> None:
    assert array_bytes((4, 4), np.dtype(getattr(ml_dtypes, dtype, dtype))) == expected


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (
            {"quant_method": "exl3"},
            "supported: fp8, gptq, awq, mxfp4, modelopt, bitnet, compressed-tensors with 8-bit floats or 4-bit",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 2}}}}, ".a.weights is"),
    ],
    ids=["method", "group"],
)
def test_an_unknown_form_is_rejected_with_those_that_are_read(found: dict[str, object], expected: str) -> None:
    assert read_form({}) is None
    with pytest.raises(CheckpointError, match=r"^model config: quantization_config") as caught:
        read_form({"quantization_config": found})
    assert expected in str(caught.value)
