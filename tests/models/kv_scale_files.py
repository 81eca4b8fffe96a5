"""Tiny checkpoints with scales of an 8-bit KV cache, as exporters write them, and the logits of models with such a cache."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.layers.policy import KVScaleKind, plain
from jaxserve.models.registry import decoder_of, open_model
from jaxserve.models.skeleton import make_skeleton
from jaxserve.quant.kv_scales import is_kv_scale
from jaxserve.runner.kv_scales.measurement import make_measurement
from jaxserve.runner.program_cache import ProgramCache
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape
from jaxserve.weights.loader import load_params
from tests.models.goldens import golden_checkpoint
from tests.models.one_row import PAGE_SIZE, new_cache, step_context
from tests.unit.checkpoint.checkpoint_files import write_safetensors

MAX_MODEL_LEN: Final = 128
PROMPT: Final = tuple(3 + 7 * place % 300 for place in range(40))
DTYPES: Final = {"fp8": "float8_e4m3fn", "fp8-bits": "uint8", "int8": "int8", None: "float32"}


def scheme(kind: str = "float", **keys: Any) -> dict[str, Any]:
    """Return the `quantization_config` of compressed-tensors for a cache alone. kind: "float" or "int"."""
    table = {"num_bits": 8, "type": kind, "strategy": "tensor", "dynamic": False, "symmetric": True, **keys}
    return {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": table}


def write_scales(
    folder: Path,
    model: str,
    quantization: Mapping[str, Any] | None,
    scales: Mapping[str, np.ndarray],
    factors: Mapping[str, float] | None = None,
) -> Path:
    """Write a tiny checkpoint with more tensors. factors: of tensors whose names have these parts."""
    source = golden_checkpoint(model).path
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("golden.npz"))
    whole = open_model(source)
    tensors = {name: np.asarray(whole.read(name)) for name in whole.tensors}
    for part, factor in (factors or {}).items():
        for name in tensors:
            if part in name:
                tensors[name] = (tensors[name] * factor).astype(tensors[name].dtype)
    write_safetensors(folder / "model.safetensors", tensors | dict(scales))
    config = json.loads((source / "config.json").read_text())
    more = {} if quantization is None else {"quantization_config": dict(quantization)}
    (folder / "config.json").write_text(json.dumps(config | more))
    return folder


def random_scales(num_layers: int, num_heads: int, largest: float, seed: int = 0) -> np.ndarray:
    """Return float32 (L, 2, K): scales of the keys and values of each head, different for every one, for numbers up to `largest`."""
    values = np.random.default_rng(seed).uniform(4, 8, (num_layers, 2, num_heads))
    return (values / largest).astype(np.float32)


class ScaledModel:
    """A checkpoint's decoder in float32, and its parameters on some devices. Arguments: see `cache_logits`."""

    def __init__(self, path: Path, kv: str | None, num_devices: int = 1, kind: KVScaleKind | None = "heads") -> None:
        checkpoint = open_model(path)
        self.decoder = decoder_of(checkpoint).with_context(MAX_MODEL_LEN).for_devices(num_devices)
        policy = plain(jnp.dtype("float32"))
        policy = replace(policy, mesh=MeshShape(num_devices), kv_scales=None if kv is None else kind)
        self.skeleton = make_skeleton(self.decoder, policy)
        self.sharding = make_sharding(self.decoder, MeshShape(num_devices))
        params = load_params(checkpoint, self.skeleton, self.sharding, lambda *_: None)
        measure = make_measurement(self.skeleton, self.sharding, 1, ProgramCache(None))
        self.params = params if measure is None else measure(params)

    @property
    def scales(self) -> dict[str, np.ndarray]:
        """Scales of the KV cache by name."""
        leaves = [leaf for leaf in self.skeleton.leaves for _ in leaf.arrays]
        pairs = zip(leaves, self.params, strict=True)
        return {leaf.name: np.asarray(array) for leaf, array in pairs if is_kv_scale(leaf.name)}


def cache_logits(
    path: Path, kv: str | None, num_devices: int = 1, kind: KVScaleKind | None = "heads", *, decodes: bool = False
) -> np.ndarray:
    """Return float32 (8, V) after the last tokens of PROMPT.

    kv: numbers of the cache, "fp8", the same as bytes ("fp8-bits", as CPUs keep them) or "int8"; None: float32 without scales. decodes: True if a decode step computes the last token.
    """
    scaled = ScaledModel(path, kv, num_devices, kind)
    decoder, skeleton, count, num_pages = scaled.decoder, scaled.skeleton, len(PROMPT), -(-len(PROMPT) // PAGE_SIZE)

    @jax.jit
    def run(params: tuple[jax.Array, ...], tokens: jax.Array) -> jax.Array:
        model, cache = skeleton.build(params), new_cache(decoder, num_pages, DTYPES[kv], jnp.float32)
        split = count - 1 if decodes else count
        hidden, cache = model.hidden(tokens[:split], cache, step_context(decoder, num_pages, jnp.int32(0), split))
        if decodes:
            last, _ = model.hidden(tokens[split:], cache, step_context(decoder, num_pages, jnp.int32(split), 1))
            hidden = jnp.concatenate([hidden, last])
        return model.logits(hidden[-8:], jnp.int32(8))

    with jax.sharding.use_abstract_mesh(scaled.sharding.mesh.abstract_mesh):
        return np.asarray(run(scaled.params, jnp.asarray(PROMPT, jnp.int32)))
