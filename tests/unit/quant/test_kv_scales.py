"""The names that exporters give to scales of the KV cache, and the numbers that these are for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.quant.kv_scales import has_only_kv_scales, kv_scale_dtype, take_kv_scales
from jaxserve.quant.tensor import TensorInfo

LAYER = "model.layers.7.self_attn."
INT8, FLOAT8 = ({"num_bits": 8, "type": kind, "dynamic": False} for kind in ("int", "float"))


def infos(*names: str, shape: tuple[int, ...] = (1,)) -> dict[str, TensorInfo]:
    return {LAYER + name: TensorInfo(LAYER + name, shape, "F32", 4, Path("file")) for name in names}


def config(**table: Any) -> dict[str, Any]:
    return {"quantization_config": table}


@pytest.mark.parametrize(
    ("table", "names", "found"),
    [
        (config(kv_cache_scheme=FLOAT8), ("k_scale", "v_scale"), "kv"),
        (config(kv_cache_scheme=FLOAT8), ("k_proj.output_scale", "v_proj.output_scale"), "kv"),
        (config(kv_cache_quant_algo="FP8"), ("k_proj.k_scale", "v_proj.v_scale"), "kv"),
        (config(quant_method="fp8", kv_cache_scheme="static"), ("kv_scale",), "kv"),
        (config(quant_method="fp8"), ("k_scale", "v_scale"), "kv"),
        (config(quant_method="fp8"), ("k_proj.output_scale",), ""),
        (config(kv_cache_quant_algo="NVFP4"), ("k_proj.k_scale",), ""),
        (config(kv_cache_scheme={**FLOAT8, "dynamic": True}), ("k_scale",), ""),
        (config(kv_cache_scheme={**INT8, "symmetric": False}), ("k_scale",), ""),
    ],
)
def test_each_exporters_scales_get_one_name(table: dict[str, Any], names: tuple[str, ...], found: str) -> None:
    tensors = infos("q_proj.weight", "k_proj.input_scale", *names)
    taken, readers = take_kv_scales(table, tensors)
    assert set(taken) == set(readers) == {f"{LAYER}{half}_scale" for half in found}
    left = set() if found or "kv_cache" in str(table) else set(infos(*names))
    assert set(tensors) == set(infos("q_proj.weight", "k_proj.input_scale")) | left, "others stay"
    values = [read(lambda name: np.float32(2.5)) for read in readers.values()]
    assert all(value.dtype == np.float32 and value.tolist() == [2.5] for value in values)


def test_a_scale_for_each_head_keeps_their_number() -> None:
    taken, readers = take_kv_scales(config(kv_cache_scheme=INT8), infos("k_scale", shape=(8, 1, 1)))
    name = f"{LAYER}k_scale"
    assert taken[name].shape == (8,)
    assert readers[name](lambda name: np.ones((8, 1, 1), np.float16)).shape == (8,)


@pytest.mark.parametrize(
    ("table", "alone", "with_tensors"),
    [
        (config(kv_cache_scheme=INT8), "int8", "int8"),
        (config(kv_cache_scheme=FLOAT8), "fp8", "fp8"),
        (config(kv_cache_quant_algo="FP8"), "fp8", "fp8"),
        (config(kv_cache_quant_algo="INT8"), "int8", "int8"),
        (config(kv_cache_quant_algo="NVFP4"), None, None),
        (config(quant_method="fp8"), None, "fp8"),
        ({}, None, "fp8"),
    ],
)
def test_the_config_says_which_numbers_scales_are_for(
    table: dict[str, Any], alone: str | None, with_tensors: str | None
) -> None:
    assert kv_scale_dtype(table) == alone
    assert kv_scale_dtype(table, infos("k_scale")) == with_tensors
    assert kv_scale_dtype(table, infos("q_proj.weight")) is None


def test_a_checkpoint_may_quantise_its_cache_alone() -> None:
    scheme = {"kv_cache_scheme": FLOAT8}
    assert has_only_kv_scales({"quant_method": "compressed-tensors", "config_groups": {}, **scheme})
    assert has_only_kv_scales({"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"})
    assert not has_only_kv_scales({"quant_method": "compressed-tensors", "config_groups": {"group_0": {}}, **scheme})
    assert not has_only_kv_scales({"quant_method": "compressed-tensors", "config_groups": {}})
    assert not has_only_kv_scales({"quant_method": "gptq", **scheme})
