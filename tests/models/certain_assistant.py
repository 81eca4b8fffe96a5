"""A model of Gemma 4 whose greedy text follows a ring, and a drafter that must know it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from jaxserve.checkpoint.safetensors_file import open_safetensors
from tests.models.goldens import assistant_golden
from tests.unit.checkpoint.checkpoint_files import write_safetensors

Source = Literal["token", "hidden"]
RING: Final = range(10, 50)
"""A token for each number of a hidden state: the text goes from each to the next one."""
_NAME: Final = "gemma4_unified_tiny"
_OUTPUTS: Final = (".o_proj.weight", ".down_proj.weight")


def certain_assistant(folder: Path, source: Source) -> tuple[Path, Path]:
    """Write the model and its drafter, whose layers add nothing; returns their folders.

    source: the drafter knows the next token from the embedding of the newest one, or from the hidden state of the one before it.
    """
    golden, dim = assistant_golden(_NAME), len(RING)
    next_one = np.roll(np.eye(dim, dtype=np.float32), 1, 0)  # from the number of a token to that of the next one

    def table(rows: np.ndarray) -> np.ndarray:
        whole = np.zeros((320, dim), np.float32)
        whole[RING.start : RING.stop] = rows
        return whole

    embeddings = {"model.embed_tokens.weight": table(np.eye(dim, dtype=np.float32))}
    model = _written(folder / "model", golden.target, {**embeddings, "lm_head.weight": table(next_one)}, {})
    zeros, ones = np.zeros((dim, dim), np.float32), np.eye(dim, dtype=np.float32)
    is_token = source == "token"
    own = {
        "pre_projection.weight": np.concatenate([ones, zeros] if is_token else [zeros, ones], 1),
        "post_projection.weight": zeros if is_token else next_one,
        "model.embed_tokens.weight": table(next_one if is_token else next_one @ next_one),
    }
    return model, _written(folder / "drafter", golden.path, own, {"hidden_size": dim})


def _written(folder: Path, like: Path, tensors: dict[str, np.ndarray], text: dict[str, Any]) -> Path:
    """Write the checkpoint `like` with these tensors, no output of its blocks, and these keys of its layers."""
    folder.mkdir(parents=True)
    config = json.loads((like / "config.json").read_text(encoding="utf-8"))
    keys = config.get("text_config", config)
    old = keys["hidden_size"]
    keys |= text
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    if "text_config" in config:
        keys["tie_word_embeddings"] = config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    stored = open_safetensors(like / "model.safetensors")
    whole = dict(tensors)
    for name in stored.tensors.keys() - tensors.keys():
        shape = tuple(keys["hidden_size"] if size == old else size for size in stored.read(name).shape)
        fill = 0.0 if name.endswith(_OUTPUTS) else 1.0
        whole[name] = np.full(shape, fill, np.float32)
    write_safetensors(folder / "model.safetensors", whole)
    return folder
