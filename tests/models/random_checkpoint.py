"""Checkpoints of random weights with sizes that no golden has, written from a config alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jaxserve.layers.policy import plain
from jaxserve.models.registry import decoder_config
from jaxserve.models.skeleton import make_skeleton


def write_random(folder: Path, config: dict[str, Any]) -> Path:
    """Write `config.json` and float32 weights of a decoder whose logits depend on all layers; returns the folder."""
    rng, tensors = np.random.default_rng(0), dict[str, np.ndarray]()
    for leaf in make_skeleton(decoder_config(config), plain(jnp.dtype("float32"))).leaves:
        for name, shape in leaf.parts.items():
            values = rng.standard_normal(shape, np.float32)
            # A row of a matrix keeps the length of its input; vectors are near the identity of norms and rates.
            tensors[name] = values * 1.3 / shape[-1] ** 0.5 if len(shape) == 2 else 0.3 * values
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
