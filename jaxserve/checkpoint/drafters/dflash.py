"""A DFlash drafter of a model (arXiv 2602.06036): its config and its tensors, as those of a decoder.

    fc                           projection of the model's hidden states of several layers, side by side
    hidden_norm                  norm of the projection
    layers.N.*, norm             layers as in Qwen3, and output norm
    lm_head, d2t                 output head of the drafter's own vocabulary, if that is smaller than the model's, and for each of its
                                 tokens what its number lacks to that of the model
    embed_tokens, lm_head        copies of the model's, which are not read
    t2d, verifier_*              not read

The config is that of the layers with more keys (`dflash_config`), as z-lab writes it, or that of the library speculators, which has
the layers' under `transformer_layer_config`. The first counts tapped layers by their outputs, the other by their inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.checkpoint.renamed import TIED, architecture, renamed
from jaxserve.errors import CheckpointError
from jaxserve.model_config.predictor import CausalLayers, DFlashConfig

_CLASSES: Final = ("DFlashDraftModel", "DFlashSpeculator")
_OTHER_CLASSES: Final = ("DFlash2DraftModel", "DSparkDraftModel", "Qwen3DSparkModel", "DominoDraftModel")
_NESTED: Final = "dflash_config"
_SOFTCAP: Final = "final_logit_softcapping"
_NOT_OF_LAYERS: Final = ("bos_token_id", "eos_token_id", "pad_token_id", "is_causal", TIED, _SOFTCAP)
_SERVED: Final[Mapping[str, tuple[object, ...]]] = {
    "projector_type": ("dflash",),
    "attention_mode": ("gqa", "mha"),
    "use_aux_hidden_state": (True,),
    "sample_from_anchor": (False,),
    "shift_label": (False,),
    "attention_sink_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "attention_value_scale": (1.0,),
    "is_neox_style": (True,),
    "fc_norm": (False,),
    "use_swa": (False,),
    "output_multiplier": (1.0,),
    "quantization_config": (),
}
"""Keys that change what a drafter computes, with the values that leave it as it is; null does, too."""
_LEFT_OUT: Final = ("t2d", "embed_tokens.", "verifier_")
_MAX_TAPPED: Final = 16
_MOST: Final = 1 << 24


def is_dflash(config: Mapping[str, Any]) -> bool:
    """Return True for `config.json` of a DFlash drafter, also of a kind that is not served."""
    is_named = architecture(config) in (*_CLASSES, *_OTHER_CLASSES) or config.get("speculators_model_type") == "dflash"
    return is_named or config.get(_NESTED) is not None


def dflash_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], DFlashConfig]:
    """Return `config.json` of a decoder with the drafter's layers and vocabulary, and what the drafter reads of its model.

    Raises CheckpointError in one line for a drafter that is not served.
    """
    name, is_speculator = architecture(config), config.get("speculators_model_type") is not None
    if name not in _CLASSES and not (is_speculator and name is None):
        raise CheckpointError(f"drafters of the class {str(name)[:80]} are not served; {_CLASSES[0]} is")
    layers = config.get("transformer_layer_config") if is_speculator else config
    nested = config.get(_NESTED) or {}
    if not isinstance(layers, Mapping) or not isinstance(nested, Mapping):
        raise CheckpointError("the DFlash drafter's config has no table of its layers, or of its own keys")
    options = {**config, **nested}
    for key, accepted in _SERVED.items():
        if options.get(key) is not None and options[key] not in accepted:
            raise CheckpointError(f"DFlash drafters with {key} {str(options[key])[:80]} are not served")
    if layers.get("model_type", "qwen3") != "qwen3":
        raise CheckpointError(
            f"DFlash drafters with layers of the type {str(layers['model_type'])[:80]} are not served; those of qwen3 are"
        )
    width, vocab_size = (_integer(layers, key) for key in ("hidden_size", "vocab_size"))
    if options.get("target_hidden_size") not in (None, width):
        raise CheckpointError(
            f"the DFlash drafter's target_hidden_size is {str(options['target_hidden_size'])[:80]}; expected its own width, {width}"
        )
    own_vocab = vocab_size if options.get("draft_vocab_size") is None else _integer(options, "draft_vocab_size")
    drafter = DFlashConfig(
        vocab_size=vocab_size,
        layers=_tapped(options, is_speculator=is_speculator),
        block_size=_integer({"block_size": 8 if is_speculator else 16, **options}, "block_size", low=2),
        mask_token_id=_integer(options, "mask_token_id", low=0, high=vocab_size),
        causal_layers=_causal_layers(options, is_speculator=is_speculator),
        embedding_scale=_number(options, "input_embedding_scale"),
        logit_softcap=_number(options, _SOFTCAP),
    )
    own = {key: value for key, value in layers.items() if key not in _NOT_OF_LAYERS}
    own |= {"architectures": ["Qwen3ForCausalLM"], "vocab_size": own_vocab}
    return own, drafter


def with_dflash_names(checkpoint: Checkpoint, drafter: DFlashConfig) -> Checkpoint:
    """Return the tensors of a drafter under the names of a decoder. The config of the checkpoint is that of the decoder."""
    if (checkpoint.path / "mask_embedding.pt").exists():
        raise CheckpointError(f"{checkpoint.path}: DFlash drafters with a mask_embedding.pt are not served")
    is_mapped = checkpoint.config["vocab_size"] != drafter.vocab_size
    unused = _LEFT_OUT if is_mapped else (*_LEFT_OUT, "d2t", "lm_head.")

    def name_in_decoder(name: str) -> str | None:
        own = name.removeprefix("model.")
        if own.startswith(unused):
            return None
        return own if own.startswith("lm_head.") else f"model.{own}"

    return renamed(checkpoint, name_in_decoder)


def _tapped(options: Mapping[str, Any], *, is_speculator: bool) -> tuple[int, ...]:
    """Return the layers whose inputs the drafter reads."""
    key, first = ("aux_hidden_state_layer_ids", 0) if is_speculator else ("target_layer_ids", 1)
    given = options.get(key)  # the output of a layer is the input of the next one
    is_list = isinstance(given, list) and 0 < len(given) <= _MAX_TAPPED
    if not is_list or not all(type(each) is int for each in given or ()):
        raise CheckpointError(
            f"the DFlash drafter's {key} is {str(given)[:80]}; expected up to {_MAX_TAPPED} numbers of layers"
        )
    return tuple(first + each for each in given or ())


def _causal_layers(options: Mapping[str, Any], *, is_speculator: bool) -> CausalLayers:
    if is_speculator:
        return "none" if options.get("sliding_window_non_causal") else "windows"
    stated = options.get("causal") if options.get("is_causal") is None else options["is_causal"]
    return "windows" if stated is None else "all" if stated else "none"


def _integer(config: Mapping[str, Any], key: str, *, low: int = 1, high: int = _MOST) -> int:
    value = config.get(key)
    if type(value) is not int or not low <= value < high:
        raise CheckpointError(
            f"the DFlash drafter's {key} is {str(value)[:80]}; expected a number from {low} to {high - 1}"
        )
    return value


def _number(config: Mapping[str, Any], key: str) -> float | None:
    value = config.get(key)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 < value < _MOST:
        raise CheckpointError(f"the DFlash drafter's {key} is {str(value)[:80]}; expected a number above 0")
    return float(value)
