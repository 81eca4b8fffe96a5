"""An EAGLE-3 head of a model (arXiv 2503.01840): its config and its tensors, as those of a decoder of one layer.

    fc                           projection of the model's hidden states of several layers, side by side
    input_norm, fc_norm.N        norm of all of them before it, or of each; few heads have one
    midlayer.*, layers.0.*       a decoder layer with norms of the token's embedding (input_layernorm) and of the hidden state
                                 (hidden_norm); queries, keys and values are projected from both
    norm, lm_head                output norm, and output head of the head's own vocabulary
    d2t                          for each token of the head, what its number lacks to that of the model
    embed_tokens                 a copy of the model's, which is read only if it was trained with the head
    t2d, verifier_*, mask_hidden not read

The config is that of the layer with more keys (`eagle_config` of some), as EAGLE, SpecForge and Model Optimizer write it, or that of
the library speculators, which has the layer's under `transformer_layer_config`. The first count tapped layers by their outputs, the
other by their inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.checkpoint.renamed import architecture, renamed
from jaxserve.errors import CheckpointError
from jaxserve.model_config.predictor import EagleConfig, TappedNorm

_NAMED: Final = "Eagle3"
"""Start or end of the names of heads' classes: Eagle3Speculator, Eagle3Qwen3vlForCausalLM, LlamaForCausalLMEagle3."""
_LAYERS: Final = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Family of the head's layer by its `model_type`."""
_NOT_OF_LAYER: Final = ("bos_token_id", "eos_token_id", "pad_token_id", "layer_types", "tie_word_embeddings")
_IDS: Final = "eagle_aux_hidden_state_layer_ids"
_LEFT_OUT: Final = ("t2d", "mask_hidden", "verifier_norm.", "verifier_lm_head.")
_IN_STACK: Final = ("fc.", "fc_norm.", "input_norm.", "norm.", "embed_tokens.", "layers.")
_MAX_TAPPED: Final = 16


def is_eagle_head(config: Mapping[str, Any]) -> bool:
    """Return True for `config.json` of an EAGLE-3 head, or of a speculator of the library speculators that is not served."""
    name = architecture(config) or ""
    return (
        name.startswith(_NAMED)
        or name.endswith(_NAMED)
        or any(config.get(key) is not None for key in ("speculators_model_type", "draft_vocab_size"))
    )


def eagle_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], EagleConfig]:
    """Return `config.json` of the head's layer, whose vocabulary is the head's, and what the head reads of its model.

    Raises CheckpointError in one line for a head that is not served.
    """
    kind = config.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise CheckpointError(
            f"speculators of the type {str(kind)[:80]} are not served; those of the types eagle3 and dflash are"
        )
    layer = config if kind is None else config.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise CheckpointError("the EAGLE-3 head's config has no transformer_layer_config")
    nested = config.get("eagle_config") or {}
    options = {**config, **nested} if isinstance(nested, Mapping) else dict(config)
    for key, accepted in (("use_aux_hidden_state", True), ("eh_proj_before_attn", False), ("parallel_drafting", False)):
        if options.get(key, accepted) not in (accepted, None):
            raise CheckpointError(f"EAGLE-3 heads with {key} {str(options[key])[:80]} are not served")
    if layer.get("num_hidden_layers", 1) != 1:
        raise CheckpointError(
            f"EAGLE-3 heads of {str(layer['num_hidden_layers'])[:80]} layers are not served; those of one are"
        )
    model_type = layer.get("model_type", "llama")
    if not isinstance(model_type, str) or model_type not in _LAYERS:
        raise CheckpointError(
            f"EAGLE-3 heads with layers of the type {str(model_type)[:80]} are not served; those of {', '.join(_LAYERS)} are"
        )
    width, vocab_size = (_integer(layer, key) for key in ("hidden_size", "vocab_size"))
    hidden_size = width if options.get("target_hidden_size") is None else _integer(options, "target_hidden_size")
    own_vocab = vocab_size if options.get("draft_vocab_size") is None else _integer(options, "draft_vocab_size")
    head = EagleConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=_tapped(config, nested),
        tapped_norm=_tapped_norm(options),
        norm_before_residual=bool(options.get("norm_before_residual")),
        norm_output=bool(options.get("norm_output") or options.get("return_hidden_post_norm")),
        has_own_embedding=hidden_size != width or bool(options.get("embed_requires_grad")),
    )
    own = {key: value for key, value in layer.items() if key not in _NOT_OF_LAYER}
    if "quantization_config" in config:
        own["quantization_config"] = config["quantization_config"]
    own |= {"architectures": [_LAYERS[model_type]], "num_hidden_layers": 1, "vocab_size": own_vocab}
    return own, head


def with_head_names(checkpoint: Checkpoint, head: EagleConfig) -> Checkpoint:
    """Return the tensors of a head under the names of a decoder's first layer. The config of the checkpoint is that of the layer."""
    has_map = checkpoint.config["vocab_size"] != head.vocab_size
    unused = (() if head.has_own_embedding else ("embed_tokens.",)) + (() if has_map else ("d2t",))

    def name_in_decoder(name: str) -> str | None:
        own = name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
        if own.startswith((*_LEFT_OUT, *unused)):
            return None
        return f"model.{own}" if own == "d2t" or own.startswith(_IN_STACK) else own

    return renamed(checkpoint, name_in_decoder)


def _tapped(config: Mapping[str, Any], nested: Any) -> tuple[int, ...] | None:
    """Return the layers whose inputs the head reads; None if the config names none."""
    given, first = config.get(_IDS), 0
    if given is None and isinstance(nested, Mapping):
        given, first = nested.get(_IDS), 1  # the output of a layer is the input of the next one
    if not given:
        return None
    if not isinstance(given, list) or len(given) > _MAX_TAPPED or not all(type(each) is int for each in given):
        raise CheckpointError(
            f"the EAGLE-3 head's {_IDS} is {str(given)[:80]}; expected up to {_MAX_TAPPED} numbers of layers"
        )
    return tuple(first + each for each in given)


def _tapped_norm(options: Mapping[str, Any]) -> TappedNorm:
    if options.get("norm_before_fc") and options.get("fc_norm"):
        raise CheckpointError("EAGLE-3 heads with both norm_before_fc and fc_norm are not served")
    return "all" if options.get("norm_before_fc") else "each" if options.get("fc_norm") else "none"


def _integer(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or not 0 < value < 1 << 24:
        raise CheckpointError(f"the EAGLE-3 head's {key} is {str(value)[:80]}; expected a number above 0")
    return value
