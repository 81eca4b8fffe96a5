"""Write the tiny checkpoints of tests/models/data/mtp, which carry a multi-token-prediction layer, and what transformers' MtpModel
computes with it, for families in `FORMS` as the code beside their published checkpoints does.

Run from the repository root where torch and transformers are installed: python tests/tools/make_mtp_goldens.py [NAME ...]
The config.json of a folder is written by hand. golden.npz, in float32 from exactly the stored weights:
    prompt_ids (T) int32, output_ids (2) int32: the model's greedy tokens after them,
    logits (8, V) float32 of the MTP layer, for the last 7 tokens of the prompt and the first output,
    draft_ids (3) int32: greedy tokens after the outputs, the first of these logits, each further one of the layer's own output,
    draft_logits (3, V) float32 that they were chosen by.
A seed is taken if no two best logits come close, float64 computes the same, and each control (the layer's inputs in the other
order, and the hidden state on the other side of the final norm) moves the logits.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from make_goldens import (
    MAX_NOISE,
    MIN_CONTROL,
    MIN_GAP,
    VOCAB_SIZE,
    class_and_config,
    load,
    published,
    published_correction,
    random_weights,
    save_weights,
)
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

DATA = Path(__file__).parents[1] / "models" / "data" / "mtp"
NUM_PROMPT, NUM_LOGITS, NUM_DRAFTS = 40, 8, 3
QWEN_NAMES = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}
"""Names of the layer's own modules in checkpoints of Qwen3-Next and Qwen3.5, after `mtp.`."""


def causal_mask(layer: int, embeddings: torch.Tensor, *_: Any) -> dict[str, torch.Tensor]:
    """Return the mask of a layer that sees the tokens before each token."""
    count = embeddings.shape[1]
    hidden = torch.full((count, count), torch.finfo(embeddings.dtype).min, dtype=embeddings.dtype)
    return {"attention_mask": hidden.triu(1)[None, None]}


def all_tokens(layer: int, embeddings: torch.Tensor, *_: Any) -> dict[str, torch.Tensor]:
    """Return the mask of a layer that knows the order of tokens: no token is padding."""
    return {"attention_mask": torch.ones(embeddings.shape[:2], dtype=torch.bool)}


@dataclass(frozen=True)
class Form:
    """A layer that transformers does not have, or computes differently."""

    names: Mapping[str, str]
    """Names in checkpoints by those of transformers' layer, where N is the number of the model's layers; "" has the rest."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Attributes of the layer's config that differ from the model's."""
    hidden_first: bool = False
    reads_residual: bool = False
    has_own_norm: bool = True
    has_own_head: bool = False
    has_one_stream: bool = False
    """True if the model has several residual streams, and the layer one."""
    mask: Any = None
    """Makes the mask of a layer for which transformers has none."""


_BLOCK, _EXTRA = "mtp_block.", ("enorm.", "hnorm.", "eh_proj.", "post_norm.")
_FINAL = {**{name: name for name in _EXTRA[:3]}, "post_norm.": "final_layernorm.", _BLOCK: ""}
_IN_LAYER = {name: f"model.layers.N.{stored}" for name, stored in _FINAL.items()}
FORMS = {
    "mimo": Form(
        {
            "enorm.": "model.mtp_layers.0.token_layernorm.",
            "hnorm.": "model.mtp_layers.0.hidden_layernorm.",
            "eh_proj.": "model.mtp_layers.0.input_proj.",
            "post_norm.": "model.mtp_layers.0.final_layernorm.",
            _BLOCK: "model.mtp_layers.0.",
        },
        {"layer_types": ["full_attention"]},
        hidden_first=True,
    ),
    "ernie4_5_moe": Form(
        {
            "enorm.": "model.mtp_emb_norm.0.",
            "hnorm.": "model.mtp_hidden_norm.0.",
            "eh_proj.": "model.mtp_linear_proj.0.",
            _BLOCK: "model.mtp_block.0.",
        },
        reads_residual=True,
        has_own_norm=False,
    ),
    "step3p5": Form(
        {
            **{name: f"model.layers.N.{name}" for name in _EXTRA},
            "post_norm.": "model.layers.N.transformer.shared_head.norm.",
            "own_head.": "model.layers.N.transformer.shared_head.output.",
            _BLOCK: "model.layers.N.",
        },
        {
            "layer_types": ["sliding_attention"],
            "mlp_layer_types": ["dense"],
            "swiglu_limits": [0.0],
            "swiglu_limits_shared": [0.7],
            "per_layer_config": {"0": {"num_attention_heads": 6}},
        },
        reads_residual=True,
        has_own_head=True,
    ),
    "mimo_v2_flash": Form(
        {
            **{name: f"model.mtp.layers.0.{name}" for name in _EXTRA},
            "post_norm.": "model.mtp.layers.0.final_layernorm.",
            f"{_BLOCK}post_attention_layernorm.": "model.mtp.layers.0.pre_mlp_layernorm.",
            f"{_BLOCK}self_attn.sinks": "model.mtp.layers.0.self_attn.attention_sink_bias",
            _BLOCK: "model.mtp.layers.0.",
        },
        {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
    ),
    "hy_v3": Form(_IN_LAYER, {"mlp_layer_types": ["sparse"]}),
    "bailing_hybrid": Form(_IN_LAYER, {"layer_types": ["full_attention"], "mlp_layer_types": ["sparse"]}),
    "hy_v4": Form(
        {name: f"model.mtp_layers.0.{stored}" for name, stored in _FINAL.items()},
        {"mlp_layer_types": ["sparse"], "indexer_types": ["full"]},
        has_one_stream=True,
        mask=causal_mask,
    ),
    "glm5_next_text": Form(
        _IN_LAYER | {"post_norm.": "model.layers.N.shared_head.norm."},
        {"layer_types": ["indexed_attention"], "mlp_layer_types": ["sparse"]},
        has_one_stream=True,
        mask=all_tokens,
    ),
    "minimax_m3_vl_text": Form(
        {
            **{name: f"model.mtp.layers.0.{stored}" for name, stored in _FINAL.items()},
            _BLOCK: "model.mtp.layers.0.transformer_layer.",
        },
        {"layer_types": ["minimax_m3_sparse"], "mlp_layer_types": ["sparse"]},
        mask=causal_mask,
    ),
}
"""By type of model. Sources: the code beside MiMo-7B's checkpoints; the model in ERNIEKit; StepFun's step3p5_mtp in vLLM and SGLang;
mimo_v2_mtp, hy_v3_mtp and the drafters of Hy4, GLM-5.3-Flash and MiniMax-M3 in vLLM; bailing_moe_nextn in SGLang."""


class PlainBlock(torch.nn.Module):
    """A decoder layer with one residual stream, of parts of a layer with several."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = layer.input_layernorm, layer.self_attn
        self.post_attention_layernorm, self.mlp = layer.post_attention_layernorm, layer.mlp

    def forward(self, hidden_states: torch.Tensor, **others: Any) -> torch.Tensor:
        """Return the layer's output."""
        x = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **others, prev_topk_indices=None)[0]
        made: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return made


class OwnPredictor(MtpModel):
    """A random layer of `FORMS`, whose parameters are rounded as they are stored."""

    def __init__(self, model: Any, form: Form, seed: int, dtype: torch.dtype) -> None:
        """model: the whole one."""
        config, kinds = own_config(model, form), {type(model.config), type(model.config.get_text_config())}
        saved = {kind: kind.get_mtp_config for kind in kinds}
        for kind in kinds:
            kind.get_mtp_config = lambda _: config
        super().__init__(model, 1)
        for kind, own in saved.items():
            kind.get_mtp_config = own
        (layer,) = self.layers
        layer.use_post_norm = not form.reads_residual
        if form.has_one_stream:
            layer.mtp_block = PlainBlock(layer.mtp_block)
        if form.has_own_head:
            layer.own_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        holder = torch.nn.Module()
        holder.config, holder.layers = config, self.layers
        random_weights(holder, seed + 1000)
        for name, value in layer.state_dict().items():
            if not name.endswith("e_score_correction_bias"):
                value.copy_(value.to(dtype).to(value.dtype))
        if not form.has_own_norm:
            layer.post_norm = decoder(model).norm
        if form.has_own_head:
            self.shared_head = layer.own_head
        if form.mask is not None:
            self.create_masks_for_mtp_layer = form.mask
        self.to(model.dtype).eval()

    def _project_to_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        (layer,) = self.layers
        logits: torch.Tensor = self.shared_head(
            hidden_states if layer.use_post_norm else layer.post_norm(hidden_states)
        )
        return logits


def decoder(model: Any) -> Any:
    """Return the part of a model with the embedding, the layers and the final norm."""
    return model.model if hasattr(model.model, "layers") else model.model.language_model


def own_config(model: Any, form: Form) -> Any:
    """Return the config of the layer."""
    config = copy.deepcopy(model.config.get_text_config())
    config.num_hidden_layers, config.num_mtp_layers = 1, 1
    for key, value in form.keys.items():
        setattr(config, key, value)
    config.mtp_hidden_states_first = form.hidden_first
    return config


def add_own_layer(folder: Path, model: Any, dtype: str, seed: int, form: Form) -> None:
    """Add a random layer of `FORMS` to the checkpoint in `folder`."""
    predictor, kind = OwnPredictor(model, form, seed, getattr(torch, dtype)), model.config.get_text_config().model_type
    number, state = model.config.get_text_config().num_hidden_layers, load_file(folder / "model.safetensors")
    for name, value in predictor.layers[0].state_dict().items():
        if name.startswith("post_norm.") and not form.has_own_norm:
            continue
        start = max((each for each in form.names if name.startswith(each)), key=len)
        whole = form.names[start].replace("N", str(number)) + name.removeprefix(start)
        if name.endswith("e_score_correction_bias"):
            state[published_correction(whole, kind)] = value.clone()
            continue
        for part, tensor in published(whole, value, kind).items():
            state[part] = tensor.to(getattr(torch, dtype)).contiguous()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


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


@torch.no_grad()
def golden(
    model: Any, predictor: Any, prompt_ids: list[int], form: Form, *, control: str = ""
) -> dict[str, np.ndarray]:
    """Return the arrays of golden.npz, without a cache. control: what a faulty layer would do."""
    first_id = int(model(torch.tensor([prompt_ids])).logits[0, -1].argmax())
    known = torch.tensor([[*prompt_ids, first_id]])
    before: list[torch.Tensor] = []
    norm = decoder(model).norm
    hook = norm.register_forward_pre_hook(lambda _, inputs: before.append(inputs[0]))
    output = model(known)
    hook.remove()
    hidden = before[0] if (control == "norm") != form.reads_residual else norm(before[0])
    next_id = int(output.logits[0, -1].argmax())
    tokens = torch.cat([known[:, 1:], torch.tensor([[next_id]])], 1)
    layer = predictor.layers[0]
    if control == "order":
        layer.enorm, layer.hnorm = layer.hnorm, layer.enorm
        predictor.config.mtp_hidden_states_first = not form.hidden_first
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
        predictor.config.mtp_hidden_states_first = form.hidden_first
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


def prepare(kind: Any, hf: Mapping[str, Any]) -> None:
    """Declare on a class of configs what transformers does not read of layers that it has."""
    if "mlp_layer_types" in hf or "index_topk" in hf:
        kind.num_mtp_layers, kind.mtp_mlp_layer_types = 1, ["sparse"]
    if hf["model_type"] == "glm4":
        kind.num_mtp_layers = 1
    if "index_topk" in hf:
        kind.mtp_layer_types = ["indexed_attention"]
    if hf["model_type"].startswith("qwen"):  # whose own modules it names as those of others
        kind.num_mtp_layers, kind.mtp_layer_types = 1, ["full_attention"]


def make(name: str) -> None:
    """Write the files of one folder."""
    folder = DATA / name
    hf = json.loads((folder / "config.json").read_text())
    rng = np.random.default_rng(len(name))
    prompt_ids = rng.integers(3, VOCAB_SIZE, NUM_PROMPT).tolist()
    form = FORMS.get(hf["model_type"])
    own = form or Form({})
    if form is None:
        prepare(type(transformers.AutoConfig.for_model(hf["model_type"])), hf)

    def computed(dtype: torch.dtype, control: str = "") -> dict[str, np.ndarray]:
        model = load(folder, dtype)
        stored = getattr(torch, hf["dtype"])
        predictor = load_layer(folder, model) if form is None else OwnPredictor(model, form, seed, stored)
        return golden(model, predictor, prompt_ids, own, control=control)

    for seed in range(100):
        whole, config = class_and_config(hf)
        fresh = whole._from_config(config, dtype=torch.float32)
        random_weights(fresh, seed)
        save_weights(fresh, hf["dtype"], folder)
        if form is None:
            add_layer(folder, fresh, hf["dtype"], seed)
        else:
            add_own_layer(folder, fresh, hf["dtype"], seed, form)
        arrays = computed(torch.float32)
        if gap(arrays["draft_logits"]) < MIN_GAP or len(set(arrays["draft_ids"].tolist())) < NUM_DRAFTS:
            continue
        moved = {
            control: float(np.abs(computed(torch.float32, control)["logits"] - arrays["logits"]).max())
            for control in ("order", "norm")
        }
        noise = np.abs(computed(torch.float64)["draft_logits"] - arrays["draft_logits"]).max()
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
