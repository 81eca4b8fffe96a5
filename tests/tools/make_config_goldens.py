"""Write tests/models/data/rope.json and configs.json: what transformers makes of a config.

Run from the repository root where torch and transformers are installed: python tests/tools/make_config_goldens.py

Written by hand is the `config` of each case: a new line with it, `"NAME": {"config": {...}}`, is enough.
rope.json, by name of the case: the keys of a Llama config, `inv_freq` (H / 2 numbers) and the factor on cos and sin,
for sequences up to the declared length.
configs.json: `layers`, by name of the case: a config.json, what `save_pretrained` writes for it if that is no part of a
model, and, layer by layer, the window and whether the layer rotates; `defaults`, by architecture: what absent keys mean,
of all keys that any family has a default for.
"""

from __future__ import annotations

import copy
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2_5_omni import configuration_qwen2_5_omni
from transformers.models.qwen3_omni_moe import configuration_qwen3_omni_moe

from jaxserve.models.registry import architectures
from tests.models.goldens import REMOTE_CODE

DATA = Path(__file__).parents[1] / "models" / "data"

SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}

WITH_TEXT_CONFIG = (
    "Glm5NextForCausalLM",
    "MiniMaxM3VLForCausalLM",
    "Llama4ForCausalLM",
    "CohereCompassForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3nForCausalLM",
    "Gemma4ForCausalLM",
    "Gemma4UnifiedForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen4ExpForCausalLM",
)
ROTATES_WINDOWS = (
    "AfmoeForCausalLM",
    "Cohere2ForCausalLM",
    "Cohere2MoeForCausalLM",
    "CohereCompassForCausalLM",
    "Exaone4ForCausalLM",
    "ExaoneMoeForCausalLM",
    "Kolibri1ForCausalLM",
    "FlintForCausalLM",
)
"""Their attention rotates in sliding-window layers only, if the model has a window; no other key says so."""
NEVER_ROTATES = ("KimiLinearForCausalLM", "NemotronHForCausalLM", "JambaForCausalLM")
NEVER_ROTATES += ("Glm5NextForCausalLM", "MambaForCausalLM", "Mamba2ForCausalLM", "FalconMambaForCausalLM")
NEVER_ROTATES += ("GPT2LMHeadModel", "GPTBigCodeForCausalLM", "GPTNeoForCausalLM", "OPTForCausalLM")


def rope_case(keys: dict[str, Any]) -> dict[str, Any]:
    """One rope case: the config.json keys, inv_freq (H / 2 numbers) and the factor on cos and sin."""
    hf = {**SIZES, "num_hidden_layers": 2, "max_position_embeddings": 131072, **keys}
    config = transformers.LlamaConfig(**json.loads(json.dumps(hf)))
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        inv_freq, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](config)
    return {"config": hf, "inv_freq": [float(x) for x in inv_freq.tolist()], "attention_factor": float(factor)}


def layer_case(keys: dict[str, Any]) -> dict[str, Any]:
    """One layers case: the window of each layer (null: none), whether it rotates, and the config as transformers saves it."""
    hf = {**SIZES, "num_hidden_layers": 6, "num_key_value_heads": 4, "max_position_embeddings": 8192, **keys}
    config = _config_class(hf["architectures"][0])(
        **{
            key: value for key, value in copy.deepcopy(hf).items() if key != "architectures"
        }  # a config changes its lists
    )
    types = getattr(config, "layer_types", None)
    if hf["architectures"][0] == "GPTNeoForCausalLM":
        config.sliding_window = config.window_size
        types = ["sliding_attention" if kind == "local" else "full_attention" for kind in config.attention_layers]
    if types is None:
        window = getattr(config, "sliding_window", None)
        windows = [window] * config.num_hidden_layers
    else:
        sizes = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
        windows = [getattr(config, sizes[name]) if name in sizes else None for name in types]
    marks = getattr(config, "no_rope_layers", None) or getattr(config, "layer_rope_theta", None)
    marks = marks or [1] * config.num_hidden_layers
    if "position_embedding_type" in vars(config):
        marks = [config.position_embedding_type == "rope"] * config.num_hidden_layers
    if hf["architectures"][0] in NEVER_ROTATES:
        marks = [0] * config.num_hidden_layers
    if hf["architectures"][0] in ROTATES_WINDOWS and getattr(config, "sliding_window", None) is not None:
        marks = [window is not None for window in windows]
    use_rope = [bool(mark) for mark in marks[: config.num_hidden_layers]]
    return {"config": hf, "saved": saved_config(config, hf), "windows": windows, "use_rope": use_rope}


def saved_config(config: transformers.PreTrainedConfig, hf: dict[str, Any]) -> dict[str, Any] | None:
    """Return what `save_pretrained` writes, without default ids of tokens, which are outside of a small vocabulary."""
    if hf["architectures"][0].endswith("TextModel"):
        return None
    saved = json.loads(config.to_json_string())
    saved = {key: value for key, value in saved.items() if key in hf or not key.endswith("_token_id")}
    return {**saved, "architectures": hf["architectures"]}


def defaulted_keys() -> list[str]:
    """Return the keys that any family has a default for; those of rope are added for each."""
    decoders = (
        family for name, family in architectures().items() if not family.only_embeds and name not in REMOTE_CODE
    )
    families = {import_module(family.decoder_config.__module__) for family in decoders}
    found = {key for family in families for key in family.DEFAULTS}
    return sorted(found - {"rope_theta", "rope_local_base_freq"})


def defaults(architecture: str, keys: list[str]) -> dict[str, Any]:
    """Return the config class's values of keys that a config.json may leave out. head_dim: null is hidden_size / heads."""
    config_class = _config_class(architecture)
    found = {key: getattr(config_class, key) for key in keys if hasattr(config_class, key)}
    found = {
        key: value for key, value in found.items() if not isinstance(value, AttributeError | property)
    }  # a removed key
    for name in {"Step3p5ForCausalLM": ["num_local_experts"], "MiniMaxM3VLForCausalLM": ["rotary_dim"]}.get(
        architecture, []
    ):
        del found[name]  # another key is read in its place
    if architecture.endswith("TextModel"):  # Only a part of a model, whose own config says whether the head is tied.
        whole = getattr(transformers, architecture.replace("TextModel", "Config"))
        found["tie_word_embeddings"] = getattr(whole, "tie_word_embeddings", False)
    theta = config_class.default_theta
    if isinstance(theta, dict):
        return found | {"rope_theta": theta["global"], "rope_local_base_freq": theta["local"]}
    return found | {"rope_theta": theta}


def _config_class(architecture: str) -> type[transformers.PreTrainedConfig]:
    name = (
        architecture.replace("ForCausalLM", "Config")
        .replace("LMHeadModel", "Config")
        .replace("TextModel", "TextConfig")
    )
    name = {"Step3p5Config": "Step3p7TextConfig"}.get(name, name)
    if architecture == "Qwen3OmniMoeThinkerTextModel":
        return configuration_qwen3_omni_moe.Qwen3OmniMoeTextConfig
    if architecture == "Qwen2_5OmniThinkerTextModel":
        return configuration_qwen2_5_omni.Qwen2_5OmniTextConfig
    if architecture in WITH_TEXT_CONFIG:
        name = architecture.replace("ForCausalLM", "TextConfig")
    found: type[transformers.PreTrainedConfig] = getattr(transformers, name)
    return found


def lines(golden: dict[str, Any]) -> str:
    """Return JSON with one entry a line, so that a change shows as one line."""
    entries = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in golden.items()]
    return "{\n" + ",\n".join(entries) + "\n}"


def main() -> None:
    """Write both files."""
    rope, configs = (json.loads((DATA / name).read_text()) for name in ("rope.json", "configs.json"))
    cases = {name: rope_case(case["config"]) for name, case in rope.items()}
    (DATA / "rope.json").write_text(lines(cases) + "\n")
    layers = {name: layer_case(case["config"]) for name, case in configs["layers"].items()}
    keys = defaulted_keys()
    names = sorted({case["config"]["architectures"][0] for case in layers.values()})
    found = {name: defaults(name, keys) for name in names}
    (DATA / "configs.json").write_text(f'{{"layers": {lines(layers)},\n"defaults": {lines(found)}}}\n')


if __name__ == "__main__":
    main()
