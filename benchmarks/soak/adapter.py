"""A LoRA adapter with random weights, so that a soak runs adapters without downloading one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import numpy as np
from safetensors.numpy import save_file

RANK: Final = 8


def write_adapter(folder: Path, *, num_layers: int, hidden_size: int, query_size: int) -> None:
    """Write an adapter of the query projections in PEFT's form, small enough to keep texts readable."""
    chance = np.random.default_rng(0)
    tensors: dict[str, np.ndarray] = {}
    for layer in range(num_layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = chance.normal(0, 0.01, (RANK, hidden_size)).astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = chance.normal(0, 0.01, (query_size, RANK)).astype(np.float32)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
