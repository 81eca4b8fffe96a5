"""Write tests/models/data/routing.npz: the experts that transformers chooses for the tokens of tiny checkpoints.

Run from the repository root where torch and transformers are installed: python tests/tools/make_routing_golden.py
For each checkpoint, uint8 (T, L, k): of the tokens of `prompt_ids` and `output_ids` of its golden.npz but the last, in each
layer that has experts, in ascending order. Computed in float32 as golden.npz is; float64 chooses the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from make_goldens import DATA, load

NAMES = (
    "deepseek_v3_tiny",
    "gemma4_moe_odd_tiny",
    "gpt_oss_tiny",
    "granitemoe_tiny",
    "mixtral_tiny",
    "qwen3_moe_tiny",
    "qwen3_next_tiny",
)


@torch.no_grad()
def routing(name: str, dtype: torch.dtype) -> np.ndarray:
    """Return the experts of every token and layer, ascending."""
    model = load(DATA / name, dtype)
    with np.load(DATA / name / "golden.npz", allow_pickle=False) as golden:
        tokens = [*golden["prompt_ids"].tolist(), *golden["output_ids"][:-1].tolist()]
    found: list[torch.Tensor] = []

    def note(module: Any, arguments: tuple[Any, ...]) -> None:
        found.append(arguments[1])  # after the inputs, before the weights

    modules = dict(model.named_modules())
    experts = [path for path in modules if path.endswith(".experts")]
    for path in experts:
        modules[path].register_forward_pre_hook(note)
    model(torch.tensor([tokens]))
    assert len(found) == len(experts) > 0, name
    return np.stack([np.sort(each.reshape(len(tokens), -1).numpy(), 1) for each in found], 1).astype(np.uint8)


def main() -> None:
    """Write all of them."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    arrays = {}
    for name in NAMES:
        arrays[name] = routing(name, torch.float32)
        assert np.array_equal(arrays[name], routing(name, torch.float64)), f"{name}: float64 chooses others"
        print(f"{name}: {arrays[name].shape}")
    np.savez_compressed(DATA / "routing.npz", **arrays)


if __name__ == "__main__":
    main()
