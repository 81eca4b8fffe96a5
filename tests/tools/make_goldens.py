"""Write the tiny checkpoints of tests/models/data and what transformers computes with them.

Run from the repository root where torch and transformers are installed: python tests/tools/make_goldens.py [NAME ...]
Written by hand are the config.json of a folder, with the keys that published models use, and its line of controls.json.
Between them the configs have: every family, 1 to 8 query heads to a kv head, tied and untied heads, biases, qk-norm, a head
dim that is not D / N, windows of 8 tokens, layers without positions, every rope scaling that a text of 104 tokens can show
(it is longer than some original lengths), both forms of its keys, f32, f16 and bf16, one file and shards.
This program adds what else a published model holds (generation_config.json, tokenizer.json, tokenizer_config.json,
safetensors) and golden.npz, computed by transformers in float32 with eager attention from exactly those files:
    prompt_ids (T) int32, logits (8, V) float32 of the last 8 prompt positions,
    output_ids (64) int32, greedy and not stopping at end tokens, gaps (64) float32 between the two best logits.
Seeds are tried in order until the greedy text is varied, no two best logits come close, every control (a change of
config that a faulty decoder would amount to, in controls.json) moves the logits, and float64 does not: what is left between two correct
float32 decoders is far below the 1e-4 that tests allow.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import remote_code
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

DATA = Path(__file__).parents[1] / "models" / "data"
VOCAB_SIZE = 320
BOS, EOS = 0, 2
NUM_PROMPT, NUM_LOGITS, NUM_TOKENS = 40, 8, 64
MIN_DISTINCT, MIN_GAP, MIN_CONTROL, MAX_NOISE = 24, 2e-3, 0.05, 8e-6
LOGIT_STD = 2.0
SHARDS = {"llama_linear_tiny": 2, "mixtral_tiny": 2}
"""Numbers of files of checkpoints with more than one."""
END_TOKENS = {"qwen2_tiny": [EOS, 0], "qwen4_exp_tiny": EOS, "qwen4_exp_odd_tiny": EOS}
"""End tokens of generation_config.json that are not those of config.json: Qwen4-Exp's end n-grams, within the prompt too."""
_NGRAMS = ".ngram_embedding."
_NUM_TABLE_SHARDS = 3
"""Tensors of a table of n-grams: `split_ngram_parts`."""
_LAYER_SCALE = ".layer_scalar"
_BLOCK_WITH_NORMS = ".norm_attn_norm"
"""Part of the names of DBRX's parameters, of which not all are norms."""
_XIELU_EPS = ".act_fn.eps"
"""Names of numbers close to zero, which are not changed: the activation jumps there by as much."""
_BALANCING = ".balancing_biases"
_FREQUENCIES = ".rotary_emb.alpha"
_HASHED = ".tid2eid"
_BUFFER_MEANS = {_LAYER_SCALE: 1.0, ".beta": 0.5, _BALANCING: -1.0}
"""Means of buffers that checkpoints store, if not 0, by the ends of their names."""
_STACKED_EXPERTS = (
    "gpt_oss",
    "qwen3_5_moe_text",
    "gemma4_text",
    "mistral4",
    "llama4_text",
    "zaya",
    "hy_v4",
    "minimax_m3_vl_text",
    "qwen4_exp_text",
)
"""Types of models whose checkpoints have the experts of a layer in one tensor."""

_TABLES = (
    "embed_tokens",
    "tok_embeddings",
    "decoder.weight",
    "lm_head",
    "wte",
    "embed_in",
    "embed_out",
    "word_embeddings",
)
_POSITIONS = ("wpe", "embed_positions")
_SCORES = ("q_proj", "k_proj", "qkv_proj", "c_attn", "query_key_value")
"""Parts of the names of embeddings and heads, of embeddings of positions, and of projections that scores come from."""
_PLAIN_NORM = {"muse_glimmer_text": "language_model.norm."}
"""Part of the name of norms that are stored whole in a model that stores others minus 1, by its type; of others `linear_attn`."""
_GPTS = (
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "modernbert-decoder",
    "opt",
    "gpt_neox",
    "gptj",
    "codegen",
    "falcon",
    "persimmon",
)
"""Types of models whose texts would repeat one token if their biases were larger."""
_PUBLISHED_NAMES: dict[str, dict[str, str]] = {
    "axk2": {
        "layernorm.mlp.fc1.": "layernorm.W_down.",
        "layernorm.mlp.fc2.": "layernorm.W_up.",
        ".q_gate_proj.": ".q_b_proj.",
    },
    "axk1": {".mlp.post_mlp_layernorm": ".post_mlp_layernorm"},
    "bailing_hybrid": {
        "model.embed_tokens.": "model.word_embeddings.",
        ".forget_gate.": ".",
        ".self_attn.": ".attention.",
        ".gate.e_score_correction_bias": ".gate.expert_bias",
    },
    "exaone_moe": {".gate.e_score_correction_bias": ".e_score_correction_bias"},
    "kimi_linear": {
        ".forget_gate.": ".",
        ".mlp.experts": ".block_sparse_moe.experts",
        ".mlp.gate.": ".block_sparse_moe.gate.",
        ".mlp.shared_experts.": ".block_sparse_moe.shared_experts.",
    },
    "kolibri1": {
        ".mlp.gate.e_score_correction_bias": ".moe.router.expert_bias",
        ".post_self_attn_layernorm.": ".post_attn_norm.",
        ".post_mlp_layernorm.": ".post_ffn_norm.",
    },
    "step3p5": {
        ".mlp.gate.e_score_correction_bias": ".moe.router_bias",
        ".mlp.gate.": ".moe.gate.",
        ".mlp.experts.": ".moe.",
        ".mlp.shared_experts.": ".share_expert.",
    },
    "glm5_next_text": {
        ".forget_gate.": ".",
        **{
            f".{block}_hc.{part}": f".hc_{block}_{part}"
            for block in ("attn", "ffn")
            for part in ("fn", "base", "scale")
        },
    },
    "laguna": {
        ".gate.e_score_correction_bias": ".experts.e_score_correction_bias",
        ".shared_experts.": ".shared_expert.",
    },
    "lfm3": {".self_attn.g_proj.": ".self_attn.gate_proj."},
    "mistral_large4_text": {
        ".self_attn.kv_a_proj_with_mqa.": ".attention.wkv_a_with_mqa.",
        ".self_attn.kv_a_layernorm.": ".attention.kv_a_norm.",
        ".self_attn.kv_b_proj.": ".attention.wkv_b.",
        ".self_attn.q_proj.": ".attention.wq.",
        ".self_attn.o_proj.": ".attention.wo.",
        ".self_attn.": ".attention.",
        ".softmax_scaling.scale": ".ssmax_scaling.s",
        ".softmax_scaling.bias": ".ssmax_scaling.b",
        ".input_layernorm.": ".attention_norm.",
        ".post_attention_layernorm.": ".ffn_norm.",
        ".mlp.shared_experts.gate_proj.": ".shared_experts.w1.",
        ".mlp.shared_experts.down_proj.": ".shared_experts.w2.",
        ".mlp.shared_experts.up_proj.": ".shared_experts.w3.",
        ".mlp.experts.": ".experts.",
        ".mlp.gate_proj.": ".feed_forward.w1.",
        ".mlp.down_proj.": ".feed_forward.w2.",
        ".mlp.up_proj.": ".feed_forward.w3.",
        ".mlp.gate.": ".gate.",
        "model.embed_tokens.": "tok_embeddings.",
        "model.norm.": "norm.",
        "model.layers.": "layers.",
        "model.rotary_emb.": "lerope.",
        "lm_head.": "output.",
    },
    "flint": {".self_attn.sinks": ".self_attn.softmax_offset"},
    "mimo_v2_flash": {".sinks": ".attention_sink_bias"},
    "deepseek_v4": {
        "model.embed_tokens.": "embed.",
        "model.": "",
        "lm_head.": "head.",
        "hc_head.hc_": "hc_head_",
        ".attn_hc.": ".hc_attn_",
        ".ffn_hc.": ".hc_ffn_",
        ".self_attn.": ".attn.",
        ".mlp.": ".ffn.",
        ".input_layernorm.": ".attn_norm.",
        ".post_attention_layernorm.": ".ffn_norm.",
        ".attn.compressor.indexer.q_b_proj.": ".attn.indexer.wq_b.",
        ".attn.compressor.indexer.scorer.": ".attn.indexer.",
        ".attn.compressor.indexer.": ".attn.indexer.compressor.",
        ".compressor.kv_norm.": ".compressor.norm.",
        ".position_bias": ".ape",
        ".sinks": ".attn_sink",
        ".q_a_proj.": ".wq_a.",
        ".q_a_norm.": ".q_norm.",
        ".attn.q_b_proj.": ".attn.wq_b.",
        ".attn.kv_proj.": ".attn.wkv.",
        ".compressor.kv_proj.": ".compressor.wkv.",
        ".compressor.gate_proj.": ".compressor.wgate.",
        ".o_a_proj.": ".wo_a.",
        ".o_b_proj.": ".wo_b.",
        ".gate.e_score_correction_bias": ".gate.bias",
        ".shared_experts.gate_proj.": ".shared_experts.w1.",
        ".shared_experts.down_proj.": ".shared_experts.w2.",
        ".shared_experts.up_proj.": ".shared_experts.w3.",
    },
    "hy_v4": {
        ".attn_hc.": ".hc_attn_layer.hc_pre.hc_",
        ".ffn_hc.": ".hc_mlp_layer.hc_pre.hc_",
        ".hc_head.hc_": ".hc_head.hc_head_",
        ".sinks": ".learnable_sink_param",
        ".self_attn.gate_proj.": ".self_attn.linear_gate.",
    },
    "hy_v3": {
        ".mlp.gate.": ".mlp.router.gate.",
        ".e_score_correction_bias": ".expert_bias",
        ".shared_experts.": ".shared_mlp.",
    },
}
"""By type of model: names in checkpoints for those of transformers."""

_TEXT_PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "muse_glimmer_text": (
        "MuseGlimmerForConditionalGeneration",
        {
            "vision_config": {
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 1,
            },
            "out_hidden_size": 8,
            "projector_hidden_size": 8,
        },
    ),
    "mistral_large4_text": (
        "MistralLarge4ForConditionalGeneration",
        {
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 1,
                "image_size": 28,
            }
        },
    ),
    "glm5_next_text": (
        "Glm5NextForConditionalGeneration",
        {
            "vision_config": {
                "hidden_size": 8,
                "intermediate_size": 8,
                "depth": 1,
                "num_heads": 1,
                "out_hidden_size": 8,
                "projection_intermediate_size": 8,
            }
        },
    ),
    "step3p5": (
        "Step3p7ForConditionalGeneration",
        {
            "vision_config": {
                "hidden_size": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 1,
                "image_size": 28,
                "mlp_ratio": 1.0,
            }
        },
    ),
}
"""By type of text model: the class with a head, which transformers has with a tower only, and what its config needs."""
_CLASSES = {"internlm3": "llama", "iquestcoder": "llama", "mimo": "qwen2"}
"""Types of models that transformers computes with the class of another type."""
_OWN, _OF_TEXT = "model.", "model.language_model."
"""Prefix of a decoder's tensors, and that of a text part's."""

CORPUS = (
    "The quick brown fox jumps over the lazy dog. A server answers many requests at once; each request is a list of "
    "tokens, and each token is a piece of a word. Hello world! How are you today? I am fine, thank you. One, two, "
    "three, four, five. The answer to the question is in the text that the reader has read before the end."
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def random_weights(model: transformers.PreTrainedModel, seed: int) -> None:
    """Weights under which heads attend unevenly, layers outweigh the embedding and logits spread by about 2."""
    config = model.config.get_text_config()
    generator = torch.Generator().manual_seed(seed)
    is_offset = (
        config.model_type.startswith(("qwen3_next", "qwen3_5", "qwen4_exp", "muse_glimmer", "step3p5", "minimax_m3"))
        or config.model_type == "nemotron"
    )
    for whole_name, weight in model.named_parameters():
        name = whole_name.replace(_BLOCK_WITH_NORMS, "")
        noise = torch.randn(weight.shape, generator=generator)
        is_plain = config.model_type in ("gemma3n_text", "gemma4_text", "gemma4_unified_text")
        if is_plain and (scale := _gemma4_scale(name, config.hidden_size)) is not None:
            value = scale * (1 + 0.2 * noise)
        elif (spread := _altup_spread(name, config.hidden_size)) is not None:
            value = spread * noise
        elif name.endswith(("A_log", ".D")):
            # Of Kimi delta attention transformers subtracts sums of decays, which cancel if decays are strong.
            is_unbounded = config.model_type == "kimi_linear" or getattr(config, "linear_lower_bound", 0) is None
            log_decay = -3 if is_unbounded else -1
            value = (1 if name.endswith(".D") else log_decay) + 0.5 * noise
        elif is_offset and "norm" in name and _PLAIN_NORM.get(config.model_type, "linear_attn") not in name:
            value = 0.2 * noise
        elif ("norm" in name or ".ln_" in name) and not name.endswith("bias"):
            value = (_gemma_norm(name) if config.model_type.startswith("gemma") else 1) + 0.2 * noise
        elif name.endswith(("states_scale", "residual_scale")):  # ZAYA's factors on the residual stream
            value = (3 if ".hidden_states" in name else 1) + 0.2 * noise
        elif name.endswith(("states_bias", "residual_bias")):
            value = 0.03 * noise
        elif "_hc." in name:  # weights of residual streams, which would amplify rounding if they varied more
            value = noise * 0.5 / weight.shape[-1] ** 0.5 + (0.5 if name.endswith("scale") else 0)
        elif ".act_fn.alpha_" in name:
            value = 0.2 + 0.3 * noise
        elif name.endswith("dt_bias") and config.model_type in ("bailing_hybrid", "glm5_next_text"):
            is_bounded = (
                getattr(config, "kda_safe_gate", None) or getattr(config, "linear_lower_bound", None) is not None
            )
            value = (-12 if is_bounded else -2) + noise  # weak decays, as for kimi_linear
        elif name.endswith("softmax_scaling.bias"):
            value = 1 + 0.2 * noise
        elif name.endswith("softmax_scaling.scale"):
            value = 0.05 * noise
        elif name.endswith("bias"):
            value = (0.1 if config.model_type in _GPTS else 0.3) * noise
        elif any(part in name for part in _POSITIONS):
            value = noise * 4 * LOGIT_STD / config.hidden_size**0.5
        elif name == "lm_head.weight" and config.model_type == "qwen4_exp_text":  # It reads a mean of gated streams.
            value = noise * 1.5 * LOGIT_STD / config.hidden_size**0.5
        elif any(part in name for part in _TABLES):
            is_gemma = config.model_type.startswith("gemma")
            value = noise * (LOGIT_STD * 0.6 if is_gemma else LOGIT_STD) / config.hidden_size**0.5
        elif any(part in name for part in _SCORES):
            value = noise * 1.2 / weight.shape[-1] ** 0.5
        else:
            value = noise * 1.5 / weight.shape[-1] ** 0.5
        weight.data.copy_(value)
    for name, buffer in stored_buffers(model).items():
        if name.endswith(_HASHED):
            scores = torch.rand(len(buffer), config.n_routed_experts, generator=generator)
            buffer.copy_(scores.argsort()[:, : buffer.shape[1]])
            continue
        noise = 0.2 * torch.randn(buffer.shape, generator=generator)
        if not name.endswith(_XIELU_EPS):
            buffer.copy_(_BUFFER_MEANS.get(name[name.rindex(".") :], 0) + noise)
        if name.endswith(_BALANCING):
            buffer[-1] = -1  # transformers puts this in place of what it loads


def _gemma4_scale(name: str, dim: int) -> float | None:
    """Return the mean of a parameter that scales: norms are stored whole, and scores are sums over a head; else None."""
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return 0.6
    if name.endswith(("norm.weight", "norm_1.weight", "norm_2.weight", "per_expert_scale")):
        return 2.0 if "post_" in name else 1.0
    if name.endswith("correct_output_scale"):
        return 1.0
    return 3 * dim**0.5 if name.endswith("router.scale") else None  # few ties that bfloat16 would decide otherwise


def _altup_spread(name: str, dim: int) -> float | None:
    """Return the spread of the weights of Gemma 3n's routers, whose inputs are divided by their number; else None."""
    if name.endswith("modality_router.weight"):
        return 0.5 * dim**0.5
    return 0.1 if name.endswith(("prediction_coefs.weight", "correction_coefs.weight")) else None


def stored_buffers(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the routers' correction biases, which transformers keeps in float32, mostly as buffers, Gemma 4's factors on
    the outputs of layers, and two numbers of xIELU."""
    return {
        name: buffer
        for name, buffer in model.state_dict().items()
        if name.endswith(
            (
                "e_score_correction_bias",
                ".expert_bias",
                _BALANCING,
                _FREQUENCIES,
                _LAYER_SCALE,
                ".act_fn.beta",
                _XIELU_EPS,
                _HASHED,
            )
        )
    }


def published_correction(name: str, model_type: str) -> str:
    """Return the name that checkpoints have for a router's correction bias."""
    if model_type in _PUBLISHED_NAMES:
        return published_name(name, model_type)
    return name.replace(".gate.moe_statics.", ".moe_statics.").replace(".mlp.e_score", ".block_sparse_moe.e_score")


def published_name(name: str, model_type: str) -> str:
    """Return the name that checkpoints have for a parameter that transformers renames as it loads it."""
    for own, other in _PUBLISHED_NAMES.get(model_type, {}).items():
        name = name.replace(own, other)
    return name


def _gemma_norm(name: str) -> float:
    """Stored without its 1. Embeddings are large there: what layers add has to be larger."""
    return 4.0 if "post_" in name else 0.0


def class_and_config(hf: dict[str, Any]) -> tuple[Any, transformers.PreTrainedConfig]:
    """Return transformers' class of a `config.json`, and its config; for a text part those of the whole model, and for a model that
    ships as code those with the same arithmetic."""
    if (remote := remote_code.find(hf)) is not None:
        hf = remote.config(hf)
    kind = _CLASSES.get(hf["model_type"], hf["model_type"])
    config = type(transformers.AutoConfig.for_model(kind)).from_dict(hf)
    if hf["model_type"] in _CLASSES:
        return transformers.AutoModelForCausalLM._model_mapping[type(config)], config
    if hf["model_type"] not in _TEXT_PARTS:
        return getattr(transformers, hf["architectures"][0]), config
    name, others = _TEXT_PARTS[hf["model_type"]]
    whole = getattr(transformers, name)
    return whole, whole.config_class(text_config=config.to_dict(), **others)


def text_name(name: str) -> str | None:
    """Return a tensor's name in a checkpoint of the text model alone; None if it belongs to a tower."""
    if name.startswith(_OF_TEXT):
        return name.replace(_OF_TEXT, _OWN, 1)
    return None if any(part in name for part in ("vision", "multi_modal", ".visual.")) else name


def text_state(model: transformers.PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint of the text model alone, with the names that checkpoints have; buffers keep their types."""
    kind = model.config.get_text_config().model_type
    state = {
        name: part.detach().to(dtype).contiguous()
        for whole, weight in model.named_parameters()
        if (own := text_name(whole)) is not None
        for name, part in published(own, weight, kind).items()
        if not whole.endswith("e_score_correction_bias")
    }
    buffers = {text_name(name): buffer for name, buffer in stored_buffers(model).items()}
    if kind == "qwen4_exp_text":  # integers that follow from the config
        state |= {name: buffer for name, buffer in model.state_dict().items() if buffer.dtype == torch.long}
    return state | {published_correction(name, kind): buffer for name, buffer in buffers.items() if name is not None}


def save_weights(model: transformers.PreTrainedModel, dtype: str, folder: Path, num_shards: int = 1) -> None:
    """One file, or shards with an index; a tied head is left out, as in published checkpoints."""
    hf = json.loads((folder / "config.json").read_text())
    state = remote_code.published(text_state(model, getattr(torch, dtype)), hf)
    if num_shards == 1:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(state)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        held = names[shard::num_shards]
        save_file({name: state[name] for name in held}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(held, file)
    total = sum(weight.numel() * weight.element_size() for weight in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def published(name: str, weight: torch.Tensor, model_type: str) -> dict[str, torch.Tensor]:
    """A parameter as checkpoints have it: transformers joins experts as it loads them, but for those joined already."""
    name = published_name(name, model_type)
    is_mixtral = model_type in ("mixtral", "minimax_m2", "phimoe", "minimax")
    if model_type in ("kimi_linear", "bailing_hybrid", "glm5_next_text") and name.endswith(".conv1d.weight"):
        parts = zip("qkv", weight.chunk(3), strict=True)
        return {name.replace(".conv1d.", f".{part}_conv1d."): own.contiguous() for part, own in parts}
    if _NGRAMS in name:
        shards = enumerate(weight.chunk(_NUM_TABLE_SHARDS))
        return {name.replace(_NGRAMS, f"{_NGRAMS}shard_{index}."): own.contiguous() for index, own in shards}
    names = (
        ("w1", "w3", "w2")
        if is_mixtral or model_type in ("lfm2_moe", "kimi_linear", "mistral_large4_text", "deepseek_v4")
        else ("gate_proj", "up_proj", "down_proj")
    )
    if is_mixtral:
        name = name.replace(".mlp.", ".block_sparse_moe.").replace(".router.", ".gate.")
    above, _, own = name.rpartition(".")
    if model_type == "step3p5" and above.endswith(".moe"):
        parts = zip(("gate_proj", "up_proj"), weight.chunk(2, dim=1), strict=True)
        stacks = dict(parts) if own == "gate_up_proj" else {own: weight}
        return {f"{above}.{part}.weight": stack.contiguous() for part, stack in stacks.items()}
    if model_type == "granitemoe_swa":  # transformers renames nothing
        return {name: weight}
    if model_type.startswith("granitemoe") and above.endswith(".experts"):
        stored = {"gate_up_proj": "input_linear", "down_proj": "output_linear"}[own]
        return {f"{above.removesuffix('.experts')}.{stored}.weight": weight}
    if not above.endswith(".experts") or model_type in _STACKED_EXPERTS:
        return {name.replace("block_sparse_moe.router.", "block_sparse_moe.router.layer."): weight}
    parts = dict(zip(names[:2], weight.chunk(2, dim=1), strict=True)) if own == "gate_up_proj" else {names[2]: weight}
    if own == "up_proj":  # experts without a gate
        parts = {own: weight}
    return {
        f"{above}.{expert}.{part}.weight": matrix
        for part, all_of in parts.items()
        for expert, matrix in enumerate(all_of)
    }


def save_tokenizer(folder: Path) -> None:
    """A byte-level BPE of VOCAB_SIZE tokens with the three control tokens of the chat template."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=1,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
    }
    config |= {"add_bos_token": False, "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def load(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> transformers.PreTrainedModel:
    """The folder in transformers with changes to its config."""
    hf = json.loads((folder / "config.json").read_text()) | changes
    if (remote := remote_code.find(hf)) is not None:
        return load_remote(folder, hf, remote.config(hf), dtype)
    whole, config = class_and_config(hf)
    is_part = hf["model_type"] in ("muse_glimmer_text", "glm5_next_text")
    names = {f"^{re.escape(_OWN)}": _OF_TEXT} if is_part else None
    model = whole.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
        key_mapping=names,
    )
    return model.eval()


def load_remote(
    folder: Path, hf: dict[str, Any], plain: dict[str, Any], dtype: torch.dtype
) -> transformers.PreTrainedModel:
    """Load the folder of a model that ships as code. plain: config.json of the class with the same arithmetic."""
    whole, config = class_and_config(plain)
    like = text_state(whole._from_config(config, dtype=torch.float32), torch.float32)
    state = remote_code.plain(load_file(folder / "model.safetensors"), like, hf)
    with TemporaryDirectory() as temporary:
        (Path(temporary) / "config.json").write_text(json.dumps(plain))
        save_file(state, Path(temporary) / "model.safetensors", metadata={"format": "pt"})
        return load(Path(temporary), dtype)


@torch.no_grad()
def last_logits(model: Any, prompt_ids: list[int]) -> torch.Tensor:
    """(8, V) of the last prompt positions."""
    return model(torch.tensor([prompt_ids])).logits[0, -NUM_LOGITS:]


def golden(model: Any, prompt_ids: list[int], num_tokens: int = NUM_TOKENS) -> dict[str, np.ndarray]:
    """The arrays of golden.npz."""
    out = model.generate(
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best_two = torch.topk(torch.cat(out.logits), 2).values
    return {
        "prompt_ids": np.asarray(prompt_ids, np.int32),
        "logits": last_logits(model, prompt_ids).numpy(),
        "output_ids": out.sequences[0, len(prompt_ids) :].numpy().astype(np.int32),
        "gaps": (best_two[:, 0] - best_two[:, 1]).numpy(),
    }


@torch.no_grad()
def is_repeatable(model: Any, arrays: dict[str, np.ndarray]) -> bool:
    """Return True if one pass over prompt and outputs has the gaps of the steps. Of equal scores of an indexer torch takes any."""
    count = len(arrays["prompt_ids"])
    tokens = torch.from_numpy(np.concatenate([arrays["prompt_ids"], arrays["output_ids"]]))
    best = torch.topk(model(tokens[None]).logits[0, count - 1 : -1], 2).values
    return bool(np.allclose((best[:, 0] - best[:, 1]).numpy(), arrays["gaps"], rtol=0, atol=1e-3))


def make(name: str, controls: dict[str, dict[str, Any]]) -> None:
    """Write the files of one folder."""
    folder = DATA / name
    hf = json.loads((folder / "config.json").read_text())
    generation = {"bos_token_id": BOS, "eos_token_id": END_TOKENS.get(name, hf["eos_token_id"])}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    save_tokenizer(folder)
    whole, config = class_and_config(hf)
    prompt_ids = np.random.default_rng(len(name)).integers(3, VOCAB_SIZE, NUM_PROMPT).tolist()
    arrays: dict[str, np.ndarray] = {}

    def distance(other: transformers.PreTrainedModel) -> float:
        return float(np.abs(last_logits(other, prompt_ids).numpy() - arrays["logits"]).max())

    for seed in range(100):
        model = whole._from_config(config, dtype=torch.float32)
        random_weights(model, seed)
        save_weights(model, hf["dtype"], folder, SHARDS.get(name, 1))
        arrays = golden(load(folder), prompt_ids)
        distinct, gap = len(set(arrays["output_ids"].tolist())), float(arrays["gaps"].min())
        if distinct < MIN_DISTINCT or gap < MIN_GAP or not is_repeatable(load(folder), arrays):
            continue
        moved = {control: distance(load(folder, **changes)) for control, changes in controls.items()}
        noise = distance(load(folder, torch.float64))
        if min(moved.values()) >= MIN_CONTROL and noise <= MAX_NOISE:
            break
    else:
        raise SystemExit(f"{name}: no seed will do (last: {distinct} distinct tokens, gap {gap})")
    np.savez_compressed(folder / "golden.npz", **arrays)
    size = sum(file.stat().st_size for file in folder.iterdir())
    spread = float(arrays["logits"].std())
    print(f"{name}: seed {seed}, {distinct} distinct, min gap {gap:.4f}, logit std {spread:.2f}, {size} bytes")
    print(f"    float64 is {noise:.1e} away, controls {moved}")


def main() -> None:
    """Write the folders named on the command line, or all."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    controls = json.loads((DATA / "controls.json").read_text())
    for name in sys.argv[1:] or controls:
        make(name, controls[name])


if __name__ == "__main__":
    main()
