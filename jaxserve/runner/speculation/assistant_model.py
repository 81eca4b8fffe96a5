"""A drafter of Gemma 4 and the model whose keys and values it reads: which layers, which kernels, and which models it is not for."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.layers.policy import DtypePolicy
from jaxserve.model_config.cache import LayerPlaces
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.runner.backend import Chip, choose_backend
from jaxserve.runner.limits import kv_cache_dtype, make_policy, of_draft_model

EXTRA_KEYS = 1
"""Keys that a layer with a window sees more than the model's: transformers' mask counts the window from the last of them."""


def attached(config: Config, decoder: DecoderConfig, draft: DecoderConfig) -> DecoderConfig:
    """Return the drafter `draft` with the places in the cache of `decoder` that its layers read: those of the last layer with
    the same window that stores keys and values.

    Both are as the same devices have them. Raises ConfigError if these would divide the heads of the two in different ways.
    """
    assert draft.assistant is not None, "a drafter of Gemma 4"
    sources, places = _sources(decoder), decoder.cache.places

    def place(source: int) -> LayerPlaces:
        paged = places[source].paged
        assert paged is not None, "a layer with attention"
        return LayerPlaces(replace(paged, is_owner=False))

    read = [sources[layer.sliding_window] for layer in draft.layers]
    layers = [*zip(draft.layers, read, strict=True)]
    if any(draft.kv_shape(layer) != decoder.kv_shape(decoder.layers[source]) for layer, source in layers):
        raise ConfigError(
            f"{config.scheduler.drafter}: not with --tensor-parallel-size {config.parallel.tensor_parallel_size}: its {draft.num_heads} query "
            "heads cannot be divided over the devices as those of the model"
        )
    return replace(
        draft,
        layers=tuple(replace(_widened(layer), kv_source=source) for layer, source in layers),
        assistant=replace(draft.assistant, places=tuple(map(place, read))),
    )


def check_model(config: Config, decoder: DecoderConfig, draft: DecoderConfig) -> None:
    """Raise ConfigError unless the layers of `draft` can read the keys and values of `decoder`."""
    own, name = draft.assistant, config.scheduler.drafter
    assert own is not None, "a drafter of Gemma 4"
    plain = decoder.latent is None and decoder.compressed is None
    sources = _sources(decoder) if plain else {}
    is_for_it = (own.hidden_size, draft.vocab_size) == (decoder.hidden_size, decoder.vocab_size)
    is_for_it &= all(layer.sliding_window in sources for layer in draft.layers) and _turns(draft) == _turns(decoder)
    if not is_for_it or any(
        _stored_shape(draft, layer) != _stored_shape(decoder, decoder.layers[sources[layer.sliding_window]])
        for layer in draft.layers
    ):
        raise ConfigError(
            f"{name}: the drafter is for another model: with hidden states of {own.hidden_size} numbers, {draft.vocab_size} tokens, and "
            f"KV heads by layer of {_shapes(draft)}; this one has {decoder.hidden_size}, {decoder.vocab_size} and {_shapes(decoder)}"
        )


def assistant_policy(config: Config, decoder: DecoderConfig, draft: DecoderConfig, chip: Chip) -> DtypePolicy:
    """Return the policy of a drafter, whose attention reads the pages of the model. Raises ConfigError if no kernel does."""
    policy, name = make_policy(of_draft_model(config), draft, chip), config.scheduler.drafter
    readers = replace(decoder, num_heads=draft.num_heads)
    dtypes = policy.activations, kv_cache_dtype(config, chip.platform)
    attention = choose_backend(config, readers, chip, *dtypes)
    if attention == "mosaic_tpu":
        raise ConfigError(
            f"{name}: not with the attention kernel of TPUs, which reads the keys of its own layer only; use --attention-backend reference"
        )
    return policy if policy.backend == attention else replace(policy, attention=attention)


def _sources(decoder: DecoderConfig) -> dict[int | None, int]:
    """Return the last layer that stores keys and values, by its window."""
    layers = enumerate(decoder.layers)
    return {
        layer.sliding_window: index
        for index, layer in layers
        if layer.has_kv and layer.kv_source is None and not layer.is_chunked
    }


def _widened(layer: LayerConfig) -> LayerConfig:
    window = layer.sliding_window
    return layer if window is None else replace(layer, sliding_window=window + EXTRA_KEYS)


def _turns(decoder: DecoderConfig) -> tuple[object, ...]:
    """Return the fields that the rotation of keys depends on."""
    return (
        decoder.rope_theta,
        decoder.rope_scaling,
        decoder.rotary_dim,
        decoder.rotary_pairs,
        decoder.sliding_rope_theta,
    )


def _stored_shape(decoder: DecoderConfig, layer: LayerConfig) -> tuple[int, int]:
    """Return the KV heads of a layer in the checkpoint, and their dim."""
    heads, dim = decoder.kv_shape(layer)
    return heads // (decoder.kv_copies if layer.num_kv_heads is None else layer.kv_copies), dim


def _shapes(decoder: DecoderConfig) -> str:
    """Return number, dim and window of the KV heads of each kind of layers."""
    kinds = dict.fromkeys(
        (*_stored_shape(decoder, layer), layer.sliding_window) for layer in decoder.layers if layer.has_kv
    )
    return ", ".join(
        f"{heads} x {dim}" + ("" if window is None else f" in a window of {window}") for heads, dim, window in kinds
    )
