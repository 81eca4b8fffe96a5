"""Scales of an 8-bit KV cache in checkpoints: a key or value is its stored number times the scale.

Exporters name the scale of a layer's keys in several ways, in the layer's attention module:

    k_scale                  compressed-tensors, AutoFP8
    k_proj.k_scale           NVIDIA's Model Optimizer
    k_proj.output_scale      compressed-tensors before 0.8, Quark; a scale of the cache only if the config has a scheme for it
    kv_scale                 early fp8 checkpoints: one for keys and values

and those of values likewise. Each is one number, or one for each KV head (`strategy` `attn_head`). Here all of them are float32 `[1]` or
`[K]` with the first name. `kv_cache_scheme` or `kv_cache_quant_algo` of `quantization_config` says which numbers they are for; without either
they are for e4m3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from jaxserve.errors import CheckpointError, shown
from jaxserve.model_config.checkpoint_quantization import KVScaleDtype
from jaxserve.quant.checkpoint import COMPRESSED_TENSORS, MODELOPT, Read, ReadMatrix
from jaxserve.quant.tensor import TensorInfo

_ATTENTION: Final = ".self_attn."
_NAMES: Final[Mapping[str, str]] = {
    "k_scale": "k",
    "k_proj.k_scale": "k",
    "v_scale": "v",
    "v_proj.v_scale": "v",
    "kv_scale": "kv",
}
"""Names in the attention module, and what the scale belongs to."""
_OF_OUTPUTS: Final[Mapping[str, str]] = {"k_proj.output_scale": "k", "v_proj.output_scale": "v"}


def is_kv_scale(name: str) -> bool:
    """Return True for the name that a scale of the KV cache has among our tensors."""
    return name.endswith((f"{_ATTENTION}k_scale", f"{_ATTENTION}v_scale"))


def kv_scale_dtype(config: Mapping[str, Any], tensors: Mapping[str, Any] | None = None) -> KVScaleDtype | None:
    """Return the numbers that the scales of a checkpoint are for; None if it has no scales that can be used.

    config: `config.json`. tensors: those of the checkpoint under our names; None: decide by the config alone.
    """
    has_scheme, dtype = _scheme(config)
    if tensors is None:
        return dtype if has_scheme else None
    return dtype if any(map(is_kv_scale, tensors)) else None


def has_only_kv_scales(table: Mapping[str, Any]) -> bool:
    """Return True if a `quantization_config` quantises the KV cache and no matrices."""
    has_matrices = table.get("config_groups") or table.get("quant_algo")
    is_known = table.get("quant_method") in (COMPRESSED_TENSORS, MODELOPT)
    return is_known and not has_matrices and _scheme({"quantization_config": table})[0]


def take_kv_scales(
    config: Mapping[str, Any], tensors: dict[str, TensorInfo]
) -> tuple[dict[str, TensorInfo], dict[str, ReadMatrix]]:
    """Remove the scales of the KV cache from `tensors`; return those that can be used under our names, and how to read them."""
    has_scheme, dtype = _scheme(config)
    names = {**_NAMES, **_OF_OUTPUTS} if has_scheme else _NAMES
    found, readers = dict[str, TensorInfo](), dict[str, ReadMatrix]()
    for name in list(tensors):
        module, separator, own = name.rpartition(_ATTENTION)
        if not separator or own not in names:
            continue
        info = tensors.pop(name)
        if dtype is None:
            continue
        for half in names[own]:
            ours = f"{module}{_ATTENTION}{half}_scale"
            found[ours] = replace(info, name=ours, shape=(math.prod(info.shape),))
            readers[ours] = partial(_read, info)
    return found, readers


def _scheme(config: Mapping[str, Any]) -> tuple[bool, KVScaleDtype | None]:
    """Return whether the config says how the cache is quantised, and the numbers of static scales."""
    table = config.get("quantization_config")
    if not isinstance(table, dict):
        return False, "fp8"
    match table.get("kv_cache_scheme"), table.get("kv_cache_quant_algo"):
        case {"num_bits": 8, "type": "float" | "int" as kind, **rest}, _:
            is_usable = rest.get("symmetric", True) is True and rest.get("dynamic", False) is False
            return True, ("fp8" if kind == "float" else "int8") if is_usable else None
        case (("static" | "fp8"), _):
            return True, "fp8"
        case None, ("FP8" | "INT8" as algorithm):
            return True, "fp8" if algorithm == "FP8" else "int8"
        case None, None:
            return False, "fp8"
    return True, None


def _read(info: TensorInfo, read: Read) -> np.ndarray:
    """Return float32 `[1]` or `[K]`. Raises CheckpointError for what is no positive number."""
    scales = np.asarray(read(info.name)).astype(np.float32).reshape(-1)
    if not np.all((scales > 0) & (scales < np.inf)):
        raise CheckpointError(f"{info.file}: tensor {shown(info.name)}: expected positive numbers, found others")
    return scales
