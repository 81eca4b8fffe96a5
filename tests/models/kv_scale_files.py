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
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape
from jaxserve.weights.loader import load_params
from tests.models.goldens import golden_checkpoint
from tests.models.one_row import PAGE_SIZE, new_cache, step_context
from tests.unit.checkpoint.checkpoint_files import write_safetensors

MAX_MODEL_LEN: Final = 128
PROMPT: Final = tuple(3 + 7 * place % 300 for place in range(40))
DTYPES: Final = {"fp8": "float8_e4m3fn", "int8": "int8", None: "float32"}


def scheme(kind: str = "float", **keys: Any) -> dict[str, Any]:
    """Return the `quantization_config` of compressed-tensors for a cache alone. kind: "float" or "int"."""
    table = {"num_bits": 8, "type": kind, "strategy": "tensor", "dynamic": False, "symmetric": True, **keys}
    return {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": table}


def write_scales(
    folder: Path,
    model: str,
    quantization: Mapping[str, Any] | None,
    scales: Mapping[str, np.ndarray],
    factor: float = 1.0,
) -> Path:
    """Write a tiny checkpoint with more tensors. factor: of all of its projections."""
    source = golden_checkpoint(model).path
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("golden.npz"))
    whole = open_model(source)
    tensors = {name: np.asarray(whole.read(name)) for name in whole.tensors}
    tensors = {name: (each * factor if "proj" in name else each).astype(each.dtype) for name, each in tensors.items()}
    write_safetensors(folder / "model.safetensors", tensors | dict(scales))
    config = json.loads((source / "config.json").read_text())
    more = {} if quantization is None else {"quantization_config": dict(quantization)}
    (folder / "config.json").write_text(json.dumps(config | more))
    return folder


def random_scales(num_layers: int, num_heads: int, largest: float, seed: int = 0) -> np.ndarray:
    """Return float32 (L, 2, K): scales of the keys and values of each head, different for every one, for numbers up to `largest`."""
    values = np.random.default_rng(seed).uniform(4, 8, (num_layers, 2, num_heads))
    return (values / largest).astype(np.float32)


def cache_logits(
    path: Path, kv: str | None, num_devices: int = 1, kind: KVScaleKind | None = "heads", *, decodes: bool = False
) -> np.ndarray:
    """Return float32 (8, V) after the last tokens of PROMPT.

    kv: numbers of the cache, "fp8" or "int8"; None: float32 without scales. decodes: True if a decode step computes the last token.
    """
    checkpoint = open_model(path)
    decoder = decoder_of(checkpoint).with_context(MAX_MODEL_LEN).for_devices(num_devices)
    count, num_pages = len(PROMPT), -(-len(PROMPT) // PAGE_SIZE)
    policy = replace(plain(jnp.dtype("float32")), mesh=MeshShape(num_devices), kv_scales=None if kv is None else kind)
    skeleton, sharding = make_skeleton(decoder, policy), make_sharding(decoder, MeshShape(num_devices))
    params = load_params(checkpoint, skeleton, sharding, lambda *_: None)

    @jax.jit
    def run(params: tuple[jax.Array, ...], tokens: jax.Array) -> jax.Array:
        model, cache = skeleton.build(params), new_cache(decoder, num_pages, DTYPES[kv], policy.activations)
        split = count - 1 if decodes else count
        hidden, cache = model.hidden(tokens[:split], cache, step_context(decoder, num_pages, jnp.int32(0), split))
        if decodes:
            last, _ = model.hidden(tokens[split:], cache, step_context(decoder, num_pages, jnp.int32(split), 1))
            hidden = jnp.concatenate([hidden, last])
        return model.logits(hidden[-8:], jnp.int32(8))

    with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
        return np.asarray(run(params, jnp.asarray(PROMPT, jnp.int32)))
