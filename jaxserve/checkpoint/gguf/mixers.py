"""Recurrent mixers in GGUF files: which layers have one, and the shapes of their tensors.

llama.cpp stores A itself instead of the logarithm of its negative, A and D of Mamba-2 as columns, its norm by its groups, and
convolutions without the axis of their one input. A of Mamba has an axis of states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from jaxserve.checkpoint.gguf.architecture import KV_HEADS, GGUFKeys

LOG_DECAY: Final = ".A_log"
GATED_NORM: Final = ".linear_attn.norm.weight"
"""Norm of a gated delta net, which is stored without the offset of other norms."""
_CONVOLUTIONS: Final = (".conv1d.weight", ".conv.conv.weight")
_DELTA_CONVOLUTIONS: Final = (".q_conv1d.weight", ".k_conv1d.weight", ".v_conv1d.weight")
"""Convolutions of Kimi delta attention, which have an axis more in front."""
_VECTORS: Final = (LOG_DECAY, ".mamba.D", ".mamba.norm.weight")


def mixed_layers(keys: GGUFKeys, config: Mapping[str, Any], mixer: str) -> list[str]:
    """Return `layer_types`: `mixer` for layers without KV heads, `full_attention` for the others.

    config: the keys that all files have.
    """
    kv_heads = keys.get(KV_HEADS)
    counts = kv_heads if isinstance(kv_heads, list) else [kv_heads] * config["num_hidden_layers"]
    return ["full_attention" if count != 0 else mixer for count in counts]


def mixer_shape(name: str, stored: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape of a mixer's tensor in Hugging Face's checkpoints; None for a tensor that is stored in its own shape."""
    if name.endswith(LOG_DECAY) and stored[-1] != 1:
        return None
    if name.endswith(_VECTORS):
        return (int(np.prod(stored)),)
    if name.endswith(_DELTA_CONVOLUTIONS) and len(stored) == 4:
        return stored[1:]
    if name.endswith(_CONVOLUTIONS) and len(stored) == 2:
        return (stored[0], 1, stored[1])
    return None
