"""Write tests/models/data/ternary.npz: logits of the tiny BitNet with ternary weights, by transformers' linear layers.

Run from the repository root where torch and transformers are installed: TORCHDYNAMO_DISABLE=1 python tests/tools/make_ternary_golden.py
The weights of bitnet_tiny are rounded as `quantization_mode` `online` rounds them, and activations to 8 bits:
    logits (8, V) float32 of the last prompt positions.
"""

from __future__ import annotations

import numpy as np
import torch
from make_goldens import DATA, last_logits, load
from transformers.integrations.bitnet import AutoBitLinear

NAME = "bitnet_tiny"


def main() -> None:
    """Replace the linear layers but the head, and compute."""
    model = load(DATA / NAME)
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            own = AutoBitLinear(module.in_features, module.out_features, bias=False, online_quant=True)
            own.weight = module.weight
            model.set_submodule(name, own)
    prompt_ids = np.load(DATA / NAME / "golden.npz")["prompt_ids"].tolist()
    np.savez_compressed(DATA / "ternary.npz", logits=last_logits(model, prompt_ids).numpy())


if __name__ == "__main__":
    main()
