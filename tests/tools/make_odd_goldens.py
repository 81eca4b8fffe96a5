"""Write tests/models/data/odd_shapes.json and odd_shapes.npz: a second shape of each family, and what transformers computes with it.

Run from the repository root where torch and transformers are installed: python tests/tools/make_odd_goldens.py [NAME ...]
Written by hand is the `config` of each model in odd_shapes.json: that of a tiny checkpoint with other sizes, which are heads of 40 or 72
numbers, three or five to a KV head, and 333 tokens. A new line with it, `"NAME": {"config": {...}}`, is enough.
Weights follow from names, shapes and a seed (tests/models/odd_shapes.py), so that none are stored.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import remote_code
import torch
import transformers
from make_goldens import (
    MIN_DISTINCT,
    MIN_GAP,
    NUM_PROMPT,
    class_and_config,
    golden,
    is_repeatable,
    last_logits,
    load,
    random_weights,
    text_state,
)

from tests.models.odd_shapes import DATA, NUM_LOGITS, Tensors, write_checkpoint

MEAN_ERROR: Final = 4
"""A mean within as many standard errors of zero is zero."""
MAX_NOISE: Final = 2e-5
"""Wider layers than those of make_goldens.py round more."""


def tensors_of(config: dict[str, Any]) -> Tensors:
    """Return shape, mean and spread of the tensors of a checkpoint, as `make_goldens.py` would write it."""
    whole, made = class_and_config(config)
    model = whole._from_config(made, dtype=torch.float32)
    random_weights(model, 0)
    found = remote_code.published(text_state(model, torch.float32), config)
    return {name: _form(tensor.detach().float()) for name, tensor in found.items()}


def _form(tensor: torch.Tensor) -> tuple[list[int], float, float]:
    if not tensor.shape:
        return [], float(tensor), 0.0
    spread = float(tensor.std()) if tensor.numel() > 1 else 0.1
    mean = float(tensor.mean())
    is_centred = abs(mean) < MEAN_ERROR * spread / tensor.numel() ** 0.5
    return list(tensor.shape), 0.0 if is_centred else round(mean, 2), float(f"{spread:.3g}")


def make(name: str, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the entry of odd_shapes.json and the arrays of odd_shapes.npz; seeds are tried as in `make_goldens.py`."""
    prompt_ids = np.random.default_rng(len(name)).integers(3, config["vocab_size"], NUM_PROMPT).tolist()
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tensors = tensors_of(config)
        for seed in range(100):
            write_checkpoint(folder, config, tensors, seed)
            arrays = golden(load(folder), prompt_ids)
            is_certain = is_repeatable(load(folder), arrays)
            distinct, gap = len(set(arrays["output_ids"].tolist())), float(arrays.pop("gaps").min())
            if distinct < MIN_DISTINCT or gap < MIN_GAP or not is_certain:
                continue
            noise = float(np.abs(last_logits(load(folder, torch.float64), prompt_ids).numpy() - arrays["logits"]).max())
            if noise <= MAX_NOISE:
                break
        else:
            raise SystemExit(f"{name}: no seed will do (last: {distinct} distinct tokens, gap {gap})")
    arrays["logits"] = arrays["logits"][-NUM_LOGITS:]
    print(
        f"{name}: seed {seed}, {distinct} distinct, min gap {gap:.4f}, logit std {arrays['logits'].std():.2f}, {noise:.1e}"
    )
    return {"config": config, "tensors": tensors, "seed": seed}, arrays


def main() -> None:
    """Write the entries of the names on the command line, or all."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    entries: dict[str, Any] = json.loads((DATA / "odd_shapes.json").read_text())
    arrays: dict[str, np.ndarray] = dict(np.load(DATA / "odd_shapes.npz", allow_pickle=False))
    for name in sys.argv[1:] or entries:
        entries[name], own = make(name, copy.deepcopy(entries[name]["config"]))
        arrays |= {f"{name}/{key}": array for key, array in own.items()}
    lines = [f"{json.dumps(name)}: {json.dumps(entry, separators=(',', ':'))}" for name, entry in entries.items()]
    (DATA / "odd_shapes.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    np.savez_compressed(DATA / "odd_shapes.npz", **arrays)


if __name__ == "__main__":
    main()
