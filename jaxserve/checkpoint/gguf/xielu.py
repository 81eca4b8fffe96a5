"""Numbers of the activation xIELU (Apertus) in GGUF files, which have them as lists in the metadata, one for each layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import numpy as np

from jaxserve.checkpoint.gguf.architecture import GGUFKeys
from jaxserve.checkpoint.protocol import Checkpoint, CheckpointView
from jaxserve.quant.tensor import TensorInfo

_NUMBERS: Final = ("alpha_n", "alpha_p", "beta", "eps")
_KEY: Final = "xielu"
"""Key of `config.json` as it would be, for the lists."""


def xielu_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the lists; raise CheckpointError if one of them has no number for a layer."""
    count, found = config["num_hidden_layers"], {}
    for name in _NUMBERS:
        key = f"xielu.{name}"
        values = keys.get(key)
        is_list = isinstance(values, list) and len(values) == count
        if not is_list or not all(isinstance(value, float) and math.isfinite(value) for value in values):
            keys.fail(key, f"a number for each of the {count} layers", values)
        found[name] = values
    return {_KEY: found}


def with_activations(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with the numbers of xIELU as tensors, if it has any."""
    tensors, readers = dict(checkpoint.tensors), {}
    for part, values in checkpoint.config.get(_KEY, {}).items():
        for layer, value in enumerate(values):
            name = f"model.layers.{layer}.mlp.act_fn.{part}"
            tensors[name] = TensorInfo(name, (1,), "F32", np.dtype(np.float32).itemsize, checkpoint.path)
            readers[name] = partial(_read_number, value)
    return CheckpointView(checkpoint, tensors, readers) if readers else checkpoint


def _read_number(value: float, _inner: Checkpoint) -> np.ndarray:
    return np.array([value], np.float32)
