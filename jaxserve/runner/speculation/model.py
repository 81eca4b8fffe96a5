"""The draft model, EAGLE-3 head, multi-token-prediction (MTP) layer or drafter of Gemma 4 of an engine, and the settings that it works with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.layers.policy import DtypePolicy
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.skeleton import (
    DecoderSkeleton,
    make_assistant_skeleton,
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
    """Declare the draft model, or the EAGLE-3 head or MTP layer as a decoder of one layer, `draft` for the model `decoder`. All of its
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
    make = make_predictor_skeleton if is_mtp else make_skeleton if draft.eagle is None else make_eagle_skeleton
    skeleton = _declared(make, draft, make_policy(of_draft_model(config), draft, chip))
    check_split(config, axis_rules(decoder.for_devices(shape.tensor), shape), skeleton)
    return DraftModel(skeleton, config.scheduler.num_speculative_tokens)


def _make_assistant(config: Config, decoder: DecoderConfig, draft: DecoderConfig, chip: Chip) -> DraftModel:
    """Declare the drafter of Gemma 4 `draft`. Raises ConfigError."""
    shape = mesh_shape(config.parallel)
    draft = attached(config, decoder, draft.for_devices(shape.tensor))
    skeleton = _declared(make_assistant_skeleton, draft, assistant_policy(config, decoder, draft, chip))
    check_split(config, axis_rules(decoder.for_devices(shape.tensor), shape), skeleton)
    return DraftModel(skeleton, config.scheduler.num_speculative_tokens)


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
    """Return the model `decoder` with the layers tapped that the EAGLE-3 head or MTP layer `draft` reads; unchanged for any other drafter.

    Raises ConfigError for a head of another model.
    """
    head, name = draft.eagle, config.scheduler.drafter
    if draft.mtp is not None:
        return replace(decoder, tapped_layers=draft.mtp.tapped_layers(decoder.num_layers))
    if head is None:
        return decoder
    if decoder.altup is not None or decoder.hyper is not None:
        raise ConfigError(f"{name}: EAGLE-3 heads of models with several residual streams are not served")
    layers = head.tapped_layers(decoder.num_layers)
    needed = (head.hidden_size, head.vocab_size)
    if needed != (decoder.hidden_size, decoder.vocab_size) or not all(
        0 <= each <= decoder.num_layers for each in layers
    ):
        raise ConfigError(
            f"{name}: the EAGLE-3 head is for another model: with hidden states of {head.hidden_size} numbers, {head.vocab_size} tokens "
            f"and hidden states before the layers {', '.join(map(str, layers))}; this one has {decoder.hidden_size}, "
            f"{decoder.vocab_size} and {decoder.num_layers} layers"
        )
    return replace(decoder, tapped_layers=layers)


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
    """Raise ConfigError for a draft model, EAGLE-3 head or MTP layer that is not served, or for a setting that does not work with one."""
    with_drafter(config, decoder, draft)  # refuses a head of another model
    if draft.cache.states:
        raise ConfigError(
            f"{config.scheduler.drafter}: a draft model with recurrent states is not served; choose one with attention only"
        )
