"""Write the LoRA adapters of tests/models/data/adapters and what transformers and peft compute with them.

Run from the repository root where torch, transformers and peft are installed (peft writes sets in hash order):
    PYTHONHASHSEED=0 python tests/tools/make_adapter_golden.py [CHECKPOINT ...]
adapters/CHECKPOINT/ADAPTER holds what `save_pretrained` of peft writes for an adapter of the tiny checkpoint of that
name, adapter_config.json and adapter_model.safetensors (float32), without its README.md.
adapters/CHECKPOINT/golden.npz is computed in float32 with eager attention from exactly those files:
    prompt_ids (T) int32, those of the checkpoint's own golden.npz, and for `base` (no adapter) and every ADAPTER
    NAME/logits (8, V) float32 of the last 8 prompt positions,
    NAME/output_ids (32) int32, greedy and not stopping at end tokens,
    NAME/gaps (32) float32 between the two best logits.
Seeds are tried in order until the greedy text is varied and unlike the base's and the other adapters', no two best
logits come close, every control (a change of the adapter's config that a faulty reader would amount to) moves the
logits, and float64 does not.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from make_goldens import DATA, MAX_NOISE, MIN_CONTROL, MIN_GAP, golden, last_logits, load
from peft import LoraConfig, PeftModel, get_peft_model

NUM_TOKENS = 32
MIN_DISTINCT, MAX_ALIKE = 16, 4
STRENGTH = 0.75
"""Size of an adapter's addition to a projection of an input of unit size; the projection itself is about twice that."""


@dataclass(frozen=True, slots=True)
class TinyAdapter:
    """The keys of one adapter, and the changes to them that must change its logits."""

    config: dict[str, Any]
    controls: dict[str, dict[str, Any]]


OTHER = "layers.1.mlp.down_proj"
"""The one module of `second` whose rank is 4 and whose alpha is 24."""
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
"""Parameters that hold the matrices of all experts of a layer."""
GRANITE_EXPERTS = ["block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"]
EXPERTS_OF_BLOCKS = ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"]
ATTENTION, GATED = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
SHARED = [f"shared_expert.{name}" for name in GATED]


def hybrid(*modules: str, experts: list[str] | None = None) -> TinyAdapter:
    """Return an adapter of these modules and of the parameters of experts in a model with recurrent layers."""
    config: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": list(modules)}
    if experts is not None:
        config["target_parameters"] = experts
    return TinyAdapter(config, controls={"alpha": {"lora_alpha": 4}})


ADAPTERS: dict[str, dict[str, TinyAdapter]] = {
    "llama3_tiny": {
        "first": TinyAdapter(
            {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
            controls={"alpha": {"lora_alpha": 4}},
        ),
        "second": TinyAdapter(
            {
                "r": 8,
                "lora_alpha": 16,
                "use_rslora": True,
                "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
                "rank_pattern": {OTHER: 4},
                "alpha_pattern": {OTHER: 24},
            },
            controls={
                "rslora": {"use_rslora": False},
                "alpha": {"alpha_pattern": {}},
                "rank": {"alpha_pattern": {OTHER: 24 * (4 / 8) ** 0.5}},
            },
        ),
    },
    "qwen3_moe_tiny": {
        "experts": TinyAdapter(
            {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "target_parameters": EXPERTS},
            controls={"alpha": {"lora_alpha": 4}},
        ),
        "down": TinyAdapter(
            {
                "r": 2,
                "lora_alpha": 8,
                "use_rslora": True,
                "target_modules": ["o_proj"],
                "target_parameters": EXPERTS[1:],
                "alpha_pattern": {"layers.2.mlp.experts.down_proj": 12},
            },
            controls={"rslora": {"use_rslora": False}, "alpha": {"alpha_pattern": {}}},
        ),
    },
    "gpt_oss_tiny": {
        "experts": TinyAdapter(
            {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "target_parameters": EXPERTS},
            controls={"alpha": {"lora_alpha": 4}},
        ),
    },
    "qwen3_next_tiny": {
        "all": hybrid("in_proj_qkvz", "in_proj_ba", "out_proj", *ATTENTION, *SHARED, experts=EXPERTS),
        "states": TinyAdapter(
            {
                "r": 2,
                "lora_alpha": 8,
                "use_rslora": True,
                "target_modules": ["in_proj_qkvz", "out_proj"],
                "alpha_pattern": {"layers.2.linear_attn.out_proj": 12},
            },
            controls={"rslora": {"use_rslora": False}, "alpha": {"alpha_pattern": {}}},
        ),
    },
    "qwen3_5_tiny": {
        "all": hybrid("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", *ATTENTION, *GATED),
    },
    "granitemoehybrid_tiny": {
        "all": hybrid("in_proj", "out_proj", *ATTENTION, "input_linear", "output_linear", experts=GRANITE_EXPERTS),
    },
    "nemotron_h_tiny": {
        "all": hybrid("in_proj", *ATTENTION, *GATED[1:], experts=["experts.up_proj", "experts.down_proj"]),
    },
    "jamba_tiny": {
        "all": hybrid("in_proj", "x_proj", "out_proj", *ATTENTION, *GATED, experts=EXPERTS_OF_BLOCKS),
    },
    "zaya_tiny": {
        "all": hybrid("q_proj", "k_proj", "v_proj_current", "v_proj_delayed", "o_proj", experts=EXPERTS),
    },
    "falcon_mamba_tiny": {
        "states": hybrid("in_proj", "x_proj"),
    },
    "falcon_h1_tiny": {
        "all": hybrid("in_proj", *ATTENTION, *GATED),
    },
    "lfm2_tiny": {
        "all": hybrid("in_proj", "out_proj", *ATTENTION[:3], "w1", "w2", "w3"),
        "states": TinyAdapter(
            {"r": 2, "lora_alpha": 8, "target_modules": ["in_proj"]}, controls={"alpha": {"lora_alpha": 4}}
        ),
    },
    "phi3_tiny": {
        "fused": TinyAdapter(
            {"r": 4, "lora_alpha": 8, "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]},
            controls={"alpha": {"lora_alpha": 4}},
        ),
    },
}


def random_matrices(model: PeftModel, seed: int) -> None:
    """A and B such that every module adds about as much, whatever its rank and scale."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if not hasattr(module, "lora_A"):
            continue
        first, second = module.lora_A["default"].weight, module.lora_B["default"].weight
        rank, width = module.r["default"], first.shape[1]
        first.data.copy_(torch.randn(first.shape, generator=generator) / width**0.5)
        spread = STRENGTH / (module.scaling["default"] * rank**0.5)
        second.data.copy_(torch.randn(second.shape, generator=generator) * spread)


def save_adapter(name: str, adapter: TinyAdapter, folder: Path, seed: int) -> None:
    """Save an adapter as peft does, with the base called by its bare name."""
    shutil.rmtree(folder, ignore_errors=True)
    base = load(DATA / name)
    base.name_or_path = name
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **adapter.config))
    random_matrices(model, seed)
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink()


def load_adapter(name: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> torch.nn.Module:
    """The checkpoint with the adapter on it, with changes to the adapter's config."""
    with tempfile.TemporaryDirectory() as path:
        changed = shutil.copytree(folder, path, dirs_exist_ok=True)
        config = json.loads((folder / "adapter_config.json").read_text()) | changes
        Path(changed, "adapter_config.json").write_text(json.dumps(config))
        return PeftModel.from_pretrained(load(DATA / name, dtype), changed).to(dtype).eval()


def make_adapter(
    name: str, adapter: TinyAdapter, folder: Path, prompt_ids: list[int], others: list[np.ndarray]
) -> dict[str, np.ndarray]:
    """Write one folder; its arrays of golden.npz."""
    arrays: dict[str, np.ndarray] = {}

    def distance(other: torch.nn.Module) -> float:
        return float(np.abs(last_logits(other, prompt_ids).numpy() - arrays["logits"]).max())

    for seed in range(100):
        save_adapter(name, adapter, folder, seed)
        arrays = golden(load_adapter(name, folder), prompt_ids, NUM_TOKENS)
        output_ids, gap = arrays["output_ids"], float(arrays["gaps"].min())
        distinct, alike = len(set(output_ids.tolist())), max(int((output_ids == other).sum()) for other in others)
        if distinct < MIN_DISTINCT or alike > MAX_ALIKE or gap < MIN_GAP:
            continue
        moved = {control: distance(load_adapter(name, folder, **keys)) for control, keys in adapter.controls.items()}
        moved["none"] = distance(load(DATA / name))
        noise = distance(load_adapter(name, folder, torch.float64))
        if min(moved.values()) >= MIN_CONTROL and noise <= MAX_NOISE:
            break
    else:
        raise SystemExit(f"{folder}: no seed will do (last: {distinct} distinct tokens, {alike} alike, gap {gap})")
    size = sum(file.stat().st_size for file in folder.iterdir())
    spread = float(arrays["logits"].std())
    print(f"{name}/{folder.name}: seed {seed}, {distinct} distinct, {alike} alike, min gap {gap:.4f}, {size} bytes")
    print(f"    logit std {spread:.2f}, float64 is {noise:.1e} away, controls {moved}")
    return arrays


def make(name: str, adapters: dict[str, TinyAdapter]) -> None:
    """Write the adapters of one checkpoint and their golden.npz."""
    folder = DATA / "adapters" / name
    shutil.rmtree(folder, ignore_errors=True)
    with np.load(DATA / name / "golden.npz", allow_pickle=False) as checkpoint:
        prompt_ids, output_ids = checkpoint["prompt_ids"].tolist(), checkpoint["output_ids"]
    found = {"base": golden(load(DATA / name), prompt_ids, NUM_TOKENS)}
    assert np.array_equal(found["base"]["output_ids"], output_ids[:NUM_TOKENS])
    for adapter_name, adapter in adapters.items():
        others = [arrays["output_ids"] for arrays in found.values()]
        found[adapter_name] = make_adapter(name, adapter, folder / adapter_name, prompt_ids, others)
    kept = {
        f"{adapter_name}/{key}": arrays[key]
        for adapter_name, arrays in found.items()
        for key in ("logits", "output_ids", "gaps")
    }
    np.savez_compressed(folder / "golden.npz", prompt_ids=found["base"]["prompt_ids"], **kept)


def main() -> None:
    """Write those that are named, or all of them."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for name in sys.argv[1:] or ADAPTERS:
        make(name, ADAPTERS[name])


if __name__ == "__main__":
    main()
