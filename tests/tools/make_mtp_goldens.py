"""Write the tiny checkpoints of tests/models/data/mtp, which carry a multi-token-prediction layer, and what transformers' MtpModel
computes with it.

Run from the repository root where torch and transformers are installed: python tests/tools/make_mtp_goldens.py [NAME ...]
The config.json of a folder is written by hand. golden.npz, in float32 from exactly the stored weights:
    prompt_ids (T) int32, output_ids (2) int32: the model's greedy tokens after them,
    logits (8, V) float32 of the MTP layer, for the last 7 tokens of the prompt and the first output,
    draft_ids (3) int32: greedy tokens after the outputs, the first of these logits, each further one of the layer's own output,
    draft_logits (3, V) float32 that they were chosen by.
A seed is taken if no two best logits come close, float64 computes the same, and each control (the layer's inputs in the other
order, and the hidden state before the final norm) moves the logits.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from make_goldens import MAX_NOISE, MIN_CONTROL, MIN_GAP, VOCAB_SIZE, load, published, random_weights, save_weights
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

DATA = Path(__file__).parents[1] / "models" / "data" / "mtp"
NUM_PROMPT, NUM_LOGITS, NUM_DRAFTS = 40, 8, 3
QWEN_NAMES = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}
"""Names of the layer's own modules in checkpoints of Qwen3-Next and Qwen3.5, after `mtp.`."""


def add_layer(folder: Path, model: transformers.PreTrainedModel, dtype: str, seed: int) -> None:
    """Add a random MTP layer to the checkpoint in `folder`."""
    predictor = MtpModel(model, 1)
    random_weights(predictor, seed + 1000)
    number, model_type = model.config.num_hidden_layers, model.config.model_type
    state = load_file(folder / "model.safetensors")
    own = {name: value for name, value in predictor.state_dict().items() if name.startswith("layers.0.")}
    for whole, weight in own.items():
        name = whole.removeprefix("layers.0.")
        is_kept = name.endswith("e_score_correction_bias")
        stored = weight.dtype if is_kept else getattr(torch, dtype)
        for part, value in published(stored_name(name, number, model_type), weight, model_type).items():
            state[part] = value.detach().to(stored).contiguous()
    if not model_type.startswith("qwen"):  # others are published with copies of both
        state[f"model.layers.{number}.embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
        state[f"model.layers.{number}.shared_head.head.weight"] = state["lm_head.weight"].clone()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def stored_name(name: str, number: int, model_type: str) -> str:
    """Return the name that checkpoints have for a parameter of transformers' layer. number: of the model's layers."""
    if not model_type.startswith("qwen"):
        return f"model.layers.{number}." + name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
    if name.startswith("mtp_block."):
        return "mtp.layers.0." + name.removeprefix("mtp_block.")
    module, _, rest = name.partition(".")
    return f"mtp.{QWEN_NAMES[module]}.{rest}"


def load_layer(folder: Path, model: Any) -> MtpModel:
    """Return the MTP layer of the checkpoint in transformers."""
    number = model.config.num_hidden_layers
    if not model.config.model_type.startswith("qwen"):
        model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{number}.*"]
    model.config.name_or_path = str(folder)
    predictor = MtpModel.from_pretrained(model).to(model.dtype).eval()
    if hasattr(model.config, "index_topk"):  # it has no masks for such layers
        predictor.create_masks_for_mtp_layer = causal_mask
    return predictor


def causal_mask(layer: int, embeddings: torch.Tensor, *_: Any) -> dict[str, torch.Tensor]:
    """Return the mask of a layer that sees the tokens before each token."""
    count = embeddings.shape[1]
    hidden = torch.full((count, count), torch.finfo(embeddings.dtype).min, dtype=embeddings.dtype)
    return {"attention_mask": hidden.triu(1)[None, None]}


@torch.no_grad()
def golden(model: Any, predictor: Any, prompt_ids: list[int], *, control: str = "") -> dict[str, np.ndarray]:
    """Return the arrays of golden.npz, without a cache. control: what a faulty layer would do."""
    first_id = int(model(torch.tensor([prompt_ids])).logits[0, -1].argmax())
    known = torch.tensor([[*prompt_ids, first_id]])
    before: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: before.append(inputs[0]))
    output = model(known)
    hook.remove()
    hidden = before[0] if control == "pre_norm" else model.model.norm(before[0])
    next_id = int(output.logits[0, -1].argmax())
    tokens = torch.cat([known[:, 1:], torch.tensor([[next_id]])], 1)
    layer = predictor.layers[0]
    if control == "order":
        layer.enorm, layer.hnorm = layer.hnorm, layer.enorm
        predictor.config.mtp_hidden_states_first = True
    all_logits, draft_ids = [], []
    for _ in range(NUM_DRAFTS):
        positions = torch.arange(tokens.shape[1])[None]
        made = predictor.forward_layer(0, hidden, positions, None, input_ids=tokens)
        all_logits.append(predictor._project_to_logits(made)[0])
        token = int(all_logits[-1][-1].argmax())
        draft_ids.append(token)
        hidden = torch.cat([hidden, made[:, -1:]], 1)
        tokens = torch.cat([tokens, torch.tensor([[token]])], 1)
    if control == "order":
        layer.enorm, layer.hnorm = layer.hnorm, layer.enorm
        predictor.config.mtp_hidden_states_first = False
    return {
        "prompt_ids": np.asarray(prompt_ids, np.int32),
        "output_ids": np.asarray([first_id, next_id], np.int32),
        "logits": all_logits[0][-NUM_LOGITS:].numpy(),
        "draft_ids": np.asarray(draft_ids, np.int32),
        "draft_logits": torch.stack([each[-1] for each in all_logits]).numpy(),
    }


def gap(logits: np.ndarray) -> float:
    best = np.sort(logits, axis=-1)
    return float((best[..., -1] - best[..., -2]).min())


def make(name: str) -> None:
    """Write the files of one folder."""
    folder = DATA / name
    hf = json.loads((folder / "config.json").read_text())
    is_qwen = hf["model_type"].startswith("qwen")
    rng = np.random.default_rng(len(name))
    prompt_ids = rng.integers(3, VOCAB_SIZE, NUM_PROMPT).tolist()
    kind = type(transformers.AutoConfig.for_model(hf["model_type"]))
    if "mlp_layer_types" in hf or "index_topk" in hf:  # transformers reads no number of MTP layers there
        kind.num_mtp_layers, kind.mtp_mlp_layer_types = 1, ["sparse"]
    if hf["model_type"] == "glm4":
        kind.num_mtp_layers = 1
    if "index_topk" in hf:
        kind.mtp_layer_types = ["indexed_attention"]
    if is_qwen:  # nor for Qwen, whose own modules it names as those of others
        kind.num_mtp_layers, kind.mtp_layer_types = 1, ["full_attention"]
    for seed in range(100):
        config = kind.from_dict(hf)
        fresh = getattr(transformers, hf["architectures"][0])._from_config(config, dtype=torch.float32)
        random_weights(fresh, seed)
        save_weights(fresh, hf["dtype"], folder)
        add_layer(folder, fresh, hf["dtype"], seed)
        model = load(folder)
        predictor = load_layer(folder, model)
        arrays = golden(model, predictor, prompt_ids)
        if gap(arrays["draft_logits"]) < MIN_GAP or len(set(arrays["draft_ids"].tolist())) < NUM_DRAFTS:
            continue
        moved = {
            control: float(
                np.abs(golden(model, predictor, prompt_ids, control=control)["logits"] - arrays["logits"]).max()
            )
            for control in ("order", "pre_norm")
        }
        wide = load(folder, torch.float64)
        noise = np.abs(
            golden(wide, load_layer(folder, wide), prompt_ids)["draft_logits"] - arrays["draft_logits"]
        ).max()
        if min(moved.values()) >= MIN_CONTROL and noise <= MAX_NOISE:
            break
    else:
        raise SystemExit(f"{name}: no seed will do")
    np.savez_compressed(folder / "golden.npz", **arrays)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(
        f"{name}: seed {seed}, drafts {arrays['draft_ids']}, float64 is {noise:.1e} away, controls {moved}, {size} bytes"
    )


def main() -> None:
    """Write the folders named on the command line, or all."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for name in sys.argv[1:] or sorted(path.name for path in DATA.iterdir()):
        make(name)


if __name__ == "__main__":
    main()
