"""The draft model, EAGLE-3 head, multi-token-prediction (MTP) layer, DFlash drafter or drafter of Gemma 4 of an engine, and the settings that
it works with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.layers.policy import DtypePolicy
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.predictor import DFlashConfig
from jaxserve.models.skeleton import (
    DecoderSkeleton,
    make_assistant_skeleton,
    make_dflash_skeleton,
    make_eagle_skeleton,
    make_predictor_skeleton,
    make_skeleton,
)
from jaxserve.runner.backend import Chip
from jaxserve.runner.inputs import DraftModel
from jaxserve.runner.limits import make_policy, mesh_shape, of_draft_model
from jaxserve.runner.speculation.assistant_model import EXTRA_KEYS, assistant_policy, attached, check_model
from jaxserve.sharding.rules import AxisRules, axis_rules


def draft_source(config: Config) -> str | None:
    """Return the path or hub id of the checkpoint with the weights that draft; None without any."""
    is_mtp = config.scheduler.speculative_method == "mtp"
    return config.model.model if is_mtp else config.scheduler.speculative_model


def make_draft_model(config: Config, decoder: DecoderConfig, draft: DecoderConfig, chip: Chip) -> DraftModel:
    """Declare the draft model, EAGLE-3 head, MTP layer or DFlash drafter `draft`, a decoder, for the model `decoder`. All of its
    layers keep the keys of the whole text; those of a drafter of Gemma 4 read the model's.

    Raises ConfigError.
    """
    check_draft_model(config, decoder, draft)
    if draft.assistant is not None:
        return _make_assistant(config, decoder, draft, chip)
    is_mtp = config.scheduler.speculative_method == "mtp"
    vision = decoder.vision if is_mtp else None  # the layer has the positions of the model
    draft = replace(draft.with_context(config.model.max_model_len), splits_windows=False, vision=vision)
    shape = mesh_shape(config.parallel)
    draft = draft.for_devices(shape.tensor)
    skeleton = _declared(_maker(draft, is_mtp=is_mtp), draft, make_policy(of_draft_model(config), draft, chip))
    check_split(config, axis_rules(decoder.for_devices(shape.tensor), shape), skeleton)
    return DraftModel(skeleton, config.scheduler.num_speculative_tokens)


def _make_assistant(config: Config, decoder: DecoderConfig, draft: DecoderConfig, chip: Chip) -> DraftModel:
    """Declare the drafter of Gemma 4 `draft`. Raises ConfigError."""
    shape = mesh_shape(config.parallel)
    draft = attached(config, decoder, draft.for_devices(shape.tensor))
    skeleton = _declared(make_assistant_skeleton, draft, assistant_policy(config, decoder, draft, chip))
    check_split(config, axis_rules(decoder.for_devices(shape.tensor), shape), skeleton)
    return DraftModel(skeleton, config.scheduler.num_speculative_tokens)


def _maker(draft: DecoderConfig, *, is_mtp: bool) -> Callable[[DecoderConfig, DtypePolicy], DecoderSkeleton]:
    if is_mtp:
        return make_predictor_skeleton
    if draft.eagle is not None:
        return make_eagle_skeleton
    return make_skeleton if draft.dflash is None else make_dflash_skeleton


@lru_cache(maxsize=16)  # a plan asks for the same one several times
def _declared(
    make: Callable[[DecoderConfig, DtypePolicy], DecoderSkeleton], draft: DecoderConfig, policy: DtypePolicy
) -> DecoderSkeleton:
    return make(draft, policy)


def with_drafter(config: Config, decoder: DecoderConfig, draft: DecoderConfig) -> DecoderConfig:
    """Return the model `decoder` as it computes and stores what `draft` reads. Raises ConfigError for the drafter of another model."""
    if draft.assistant is not None:
        if not draft.assistant.places:
            check_model(config, decoder, draft)
        return replace(decoder, window_margin=EXTRA_KEYS)
    return with_tapped_layers(config, decoder, draft)


def with_tapped_layers(config: Config, decoder: DecoderConfig, draft: DecoderConfig) -> DecoderConfig:
    """Return the model `decoder` with the layers tapped that the EAGLE-3 head, MTP layer or DFlash drafter `draft` reads; unchanged for
    any other drafter.

    Raises ConfigError for a head or drafter of another model.
    """
    name = config.scheduler.drafter
    if draft.mtp is not None:
        return replace(decoder, tapped_layers=draft.mtp.tapped_layers(decoder.num_layers))
    if draft.eagle is not None:
        kind, width, vocab_size = "EAGLE-3 head", draft.eagle.hidden_size, draft.eagle.vocab_size
        layers, last = draft.eagle.tapped_layers(decoder.num_layers), decoder.num_layers
    elif draft.dflash is not None:
        kind, width, vocab_size = "DFlash drafter", draft.hidden_size, draft.dflash.vocab_size
        layers, last = draft.dflash.layers, decoder.num_layers - 1
    else:
        return decoder
    if decoder.altup is not None or decoder.hyper is not None:
        raise ConfigError(f"{name}: {kind}s of models with several residual streams are not served")
    is_for_it = (width, vocab_size) == (decoder.hidden_size, decoder.vocab_size)
    if not is_for_it or not all(0 <= each <= last for each in layers):
        raise ConfigError(
            f"{name}: the {kind} is for another model: with hidden states of {width} numbers, {vocab_size} tokens "
            f"and hidden states before the layers {', '.join(map(str, layers))}; this one has {decoder.hidden_size}, "
            f"{decoder.vocab_size} and {decoder.num_layers} layers"
        )
    return replace(decoder, tapped_layers=layers)


def _check_block(config: Config, decoder: DecoderConfig, draft: DecoderConfig, drafter: DFlashConfig) -> None:
    """Raise ConfigError for a number of drafts, windows or logits that the DFlash drafter `draft` does not work with."""
    name, num_drafts = config.scheduler.drafter, config.scheduler.num_speculative_tokens
    if num_drafts >= drafter.block_size:
        raise ConfigError(
            f"--num-speculative-tokens {num_drafts}: the DFlash drafter predicts blocks of {drafter.block_size} tokens, the newest one "
            f"and at most {drafter.block_size - 1} drafted ones"
        )
    if drafter.causal_layers == "none" and any(layer.sliding_window is not None for layer in draft.layers):
        raise ConfigError(f"{name}: DFlash drafters whose layers with sliding windows are not causal are not served")
    if drafter.logit_softcap not in (None, decoder.logit_softcap):
        raise ConfigError(
            f"{name}: the DFlash drafter has final_logit_softcapping {drafter.logit_softcap:g}, its model {decoder.logit_softcap}"
        )


def check_split(config: Config, rules: AxisRules, draft: DecoderSkeleton) -> None:
    """Raise ConfigError unless devices share the parameters and the cache of `draft` as they do those of the model, whose rules
    place both."""
    own = draft.policy.rules
    axes = {"kv_heads"} | {axis for array in draft.arrays for axis in array.axes if axis is not None}
    if others := sorted(axis for axis in axes if rules.mesh_axes(axis) != own.mesh_axes(axis)):
        raise ConfigError(
            f"{config.scheduler.drafter}: not with --tensor-parallel-size {config.parallel.tensor_parallel_size}: {', '.join(others)} cannot be "
            "divided over the devices as in the model"
        )


def check_draft_model(config: Config, decoder: DecoderConfig, draft: DecoderConfig) -> None:
    """Raise ConfigError for a drafter that is not served, or for a setting that does not work with one."""
    with_drafter(config, decoder, draft)  # refuses a head of another model
    if draft.dflash is not None:
        _check_block(config, decoder, draft, draft.dflash)
    if draft.cache.states:
        raise ConfigError(
            f"{config.scheduler.drafter}: a draft model with recurrent states is not served; choose one with attention only"
        )
