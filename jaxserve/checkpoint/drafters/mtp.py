"""The multi-token-prediction (MTP) layer of a checkpoint, as a checkpoint of one layer.

Checkpoints name it as the layer after the last one, L ("layer"), or have a module for it ("module"):

    model.layers.L.enorm                mtp.pre_fc_norm_embedding    norm of the next token's embedding
    model.layers.L.hnorm                mtp.pre_fc_norm_hidden       norm of the model's hidden state
    model.layers.L.eh_proj              mtp.fc                       projection of both, side by side
    model.layers.L.self_attn, .mlp, ... mtp.layers.0.*               a decoder layer
    model.layers.L.shared_head.norm     mtp.norm                     norm before the output head
    model.layers.L.embed_tokens, .shared_head.head                   copies of the model's own, which are not read

Both put the embedding first, and take the hidden state after the model's final norm. Others differ in names, and some in what `MTPConfig`
says: MiMo ("mimo") puts the hidden state first; ERNIE 4.5 ("ernie") and Step 3.5 ("step") take it before the final norm; ERNIE 4.5 uses
that norm before the output head, too, and Step 3.5 has an output head of its own.

Sources: DeepSeek-V3 (arXiv 2412.19437, section 2.2), and the names in its published checkpoints and those of GLM-4.5; those of
Qwen3-Next and Qwen3.5; the code beside MiMo-7B's checkpoints; vLLM's and SGLang's `mimo_v2_mtp`; the model in ERNIEKit; StepFun's
`step3p5_mtp` in vLLM and SGLang; SGLang's `bailing_moe_nextn`; vLLM's drafters of Hunyuan 3, Hy4, GLM-5.3-Flash and MiniMax-M3.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from jaxserve.checkpoint.family import Family, MTPForm
from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.checkpoint.renamed import architecture, renamed
from jaxserve.errors import CheckpointError
from jaxserve.model_config.predictor import MTPConfig

_DEDICATED: Final = "mtp_use_dedicated_embeddings"
_NEXTN: Final = "num_nextn_predict_layers"
_IN_LAYER: Final = {
    "enorm.": "model.enorm.",
    "hnorm.": "model.hnorm.",
    "eh_proj.": "model.eh_proj.",
    "shared_head.norm.": "model.norm.",
    "final_layernorm.": "model.norm.",
}
_BLOCK: Final = {"": "model.layers.0."}
_COPIES: Final = ("embed_tokens.", "shared_head.head.", "shared_head.weight")


@dataclass(frozen=True, slots=True)
class _Form:
    prefix: str
    """Start of the names of all of the layer's tensors; L stands for the number of the model's layers."""
    names: Mapping[str, str]
    """Our names of modules by the checkpoint's, after the prefix."""
    config: MTPConfig = MTPConfig()
    count_key: str = _NEXTN
    is_counted: bool = True
    """False: configs may lack `count_key`, and tensors tell."""
    shared: str | None = None
    """A module of the model that the layer uses, too."""


_FORMS: Final[Mapping[MTPForm, _Form]] = {
    "layer": _Form("model.layers.L.", _IN_LAYER | _BLOCK),
    "module": _Form(
        "mtp.",
        {
            "pre_fc_norm_embedding.": "model.enorm.",
            "pre_fc_norm_hidden.": "model.hnorm.",
            "fc.": "model.eh_proj.",
            "norm.": "model.norm.",
            "layers.0.": "model.layers.0.",
        },
        count_key="mtp_num_hidden_layers",
        is_counted=False,  # Qwen3-Next
    ),
    "mimo": _Form(
        "model.mtp_layers.0.",
        {
            "token_layernorm.": "model.enorm.",
            "hidden_layernorm.": "model.hnorm.",
            "input_proj.": "model.eh_proj.",
            "final_layernorm.": "model.norm.",
            **_BLOCK,
        },
        MTPConfig(hidden_first=True),
    ),
    "mimo_v2": _Form(
        "model.mtp.layers.0.",
        {"pre_mlp_layernorm.": "model.layers.0.post_attention_layernorm.", **_IN_LAYER, **_BLOCK},
        is_counted=False,
    ),
    "hy_v4": _Form("model.mtp_layers.0.", _IN_LAYER | _BLOCK, is_counted=False),
    "minimax_m3": _Form(
        "model.mtp.layers.0.",
        {**_IN_LAYER, "transformer_layer.": "model.layers.0."},
        count_key="num_mtp_modules",
    ),
    "ernie": _Form(
        "model.mtp_",
        {
            "emb_norm.0.": "model.enorm.",
            "hidden_norm.0.": "model.hnorm.",
            "linear_proj.0.": "model.eh_proj.",
            "block.0.": "model.layers.0.",
        },
        MTPConfig(reads_residual=True),
        shared="model.norm.",
    ),
    "step": _Form(
        "model.layers.L.",
        {"shared_head.output.": "lm_head.", **_IN_LAYER, **_BLOCK},
        MTPConfig(reads_residual=True, has_own_head=True),
    ),
}


def mtp_config(config: Mapping[str, Any], families: Collection[Family]) -> tuple[dict[str, Any], MTPConfig]:
    """Return `config.json` of the first MTP layer alone, as a decoder of one layer of the same family, and what the layer reads.

    Raises CheckpointError in one line for a model without such a layer, or whose MTP layers are not served.
    """
    family, form = _form(config, families)
    count = config.get(form.count_key, None if form.is_counted else 1)
    if type(count) is not int or count < 1:
        raise CheckpointError(
            f"no multi-token-prediction layer in this checkpoint: {form.count_key} is {str(count)[:80]}"
        )
    if config.get(_DEDICATED):
        raise CheckpointError(
            f"multi-token-prediction layers with embeddings of their own ({_DEDICATED}) are not served"
        )
    one = {"num_hidden_layers": 1, form.count_key: 0, "first_k_dense_replace": 0}
    kind = "full_attention" if config.get("index_topk") is None else "indexed_attention"
    lists = {"layer_types": [kind], "mlp_layer_types": ["sparse"]}
    given: dict[str, Any] = {
        key: value for key, value in lists.items() if config.get(key) is not None or family.mtp == "module"
    }
    own_indexer = {"indexer_types": ["full"], "index_topk_pattern": "F"}  # whichever layers of the model have one
    given |= {key: value for key, value in own_indexer.items() if config.get(key) is not None}
    dense = config.get("mlp_only_layers")
    if isinstance(dense, list):  # of Qwen's layers; the MTP layer counts as layer 0
        given["mlp_only_layers"] = [layer for layer in dense if layer == 0]
    return {**config, **one, **given, **family.mtp_keys(config)}, form.config


def only_mtp_layer(checkpoint: Checkpoint, num_layers: int, families: Collection[Family]) -> Checkpoint:
    """Return the tensors that the first MTP layer of a model with `num_layers` layers uses, under their own names."""
    form = _form(checkpoint.config, families)[1]
    prefixes = (_prefix(form, num_layers), *([form.shared] if form.shared is not None else []))
    return renamed(checkpoint, lambda name: name if name.startswith(prefixes) else None)


def as_first_layer(checkpoint: Checkpoint, num_layers: int, families: Collection[Family]) -> Checkpoint:
    """Return the tensors of `only_mtp_layer` under the names of a decoder's first layer, without copies of the model's own.

    Raises CheckpointError if there are none.
    """
    form = _form(checkpoint.config, families)[1]
    prefix = _prefix(form, num_layers)

    def name_in_layer(name: str) -> str | None:
        if not name.startswith(prefix):
            return name
        own = name.removeprefix(prefix).removeprefix("transformer.")  # in checkpoints of Step 3.5
        if own.startswith(_COPIES):
            return None
        return next((new + own.removeprefix(old) for old, new in form.names.items() if own.startswith(old)), None)

    found = renamed(checkpoint, name_in_layer)
    if not any(name.startswith(prefix) for name in checkpoint.tensors):
        raise CheckpointError(
            f"{checkpoint.path}: tensors of the multi-token-prediction layer expected at {prefix}* ({form.count_key}); found none"
        )
    return found


def _form(config: Mapping[str, Any], families: Collection[Family]) -> tuple[Family, _Form]:
    """Return the model's family, and the form of its layer. Raises CheckpointError."""
    name = architecture(config)
    served = {each: family for family in families if family.mtp for each in family.architectures}
    if name not in served and config.get("num_mtp_modules"):
        raise CheckpointError(
            f"the config of this {str(name)[:80]} model declares multi-token-prediction layers (num_mtp_modules), but its published "
            "checkpoints do not have them; draft with --speculative-model and an EAGLE-3 head"
        )
    if name not in served or (form := served[name].mtp) is None:
        raise CheckpointError(
            f"multi-token-prediction layers of {str(name)[:80]} models are not served; those of {', '.join(sorted(served))} are"
        )
    return served[name], _FORMS[form]


def _prefix(form: _Form, num_layers: int) -> str:
    return form.prefix.replace("L", str(num_layers))
