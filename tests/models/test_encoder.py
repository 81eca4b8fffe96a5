"""The encoder against transformers on tiny checkpoints, texts packed side by side."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels.segment_attention import QUERY_BLOCK

from jaxserve.errors import CheckpointError
from jaxserve.layers.policy import plain
from jaxserve.layers.segment_attention import Texts, attend, attend_alike
from jaxserve.model_config.encoder import EncoderConfig
from jaxserve.models.registry import decoder_of, model_of, open_model
from jaxserve.models.skeleton import make_encoder_skeleton
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape
from jaxserve.weights.loader import load_params
from tests.models.goldens import DATA, EncoderGolden, encoder_golden

pytestmark = [pytest.mark.slow, pytest.mark.versions]

NAMES = ["bert_tiny", "roberta_tiny"]


def packed_hidden(
    path: Path, texts: list[np.ndarray], num_tokens: int, num_devices: int = 1, fused_for: int = 0
) -> list[np.ndarray]:
    """Return the encoder's vectors of each text, packed on an axis of `num_tokens` with padding at its end."""
    checkpoint = open_model(path)
    config = model_of(checkpoint)
    assert isinstance(config, EncoderConfig)
    skeleton = make_encoder_skeleton(config, replace(plain(jnp.dtype("float32")), fused_for=fused_for))
    params = load_params(checkpoint, skeleton, make_sharding(config, MeshShape(num_devices)), lambda *_: None)
    lengths = [len(text) for text in texts]
    padding = num_tokens - sum(lengths)
    rows = np.repeat(np.arange(len(texts) + 1), [*lengths, padding]).astype(np.int32)
    positions = np.concatenate([*(np.arange(length) for length in lengths), np.zeros(padding, int)]).astype(np.int32)
    tokens = np.concatenate([*texts, np.zeros(padding, np.int32)]).astype(np.int32)

    @jax.jit
    def run(params: tuple[jax.Array, ...]) -> jax.Array:
        packing = Texts(jnp.asarray(rows), jnp.int32(sum(lengths)), config.max_position)
        return skeleton.build(params).hidden(
            jnp.asarray(tokens), jnp.asarray(positions), jnp.zeros(num_tokens, jnp.int32), packing
        )

    ends = np.cumsum(lengths)
    return np.split(np.asarray(run(params)), ends)[: len(texts)]


@pytest.mark.parametrize("name", NAMES)
def test_hidden_states_equal_transformers(name: str) -> None:
    golden = encoder_golden(name)
    found = packed_hidden(golden.path, golden.token_ids, 100)
    for ours, theirs in zip(found, golden.hidden, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("fused_for", [0, 2])
def test_two_devices_split_the_heads(fused_for: int) -> None:
    golden = encoder_golden("bert_tiny")
    found = packed_hidden(golden.path, golden.token_ids, 100, num_devices=2, fused_for=fused_for)
    for ours, theirs in zip(found, golden.hidden, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("num_tokens", [5, QUERY_BLOCK + 1, 3 * QUERY_BLOCK - 7])
def test_attention_stays_within_each_text_at_every_border(num_tokens: int) -> None:
    """Against each text alone; blocks of queries begin and end inside of texts, and the last one overlaps."""
    rng = np.random.default_rng(num_tokens)
    borders = np.unique(np.concatenate([[0, num_tokens], rng.integers(0, num_tokens, 12)]))
    rows = np.repeat(np.arange(len(borders) - 1), np.diff(borders))
    longest = int(np.diff(borders).max())
    query, key, value = (jnp.asarray(rng.standard_normal((num_tokens, 2, 4)), jnp.float32) for _ in range(3))
    found = attend(query, key, value, Texts(jnp.asarray(rows), jnp.int32(num_tokens), longest))
    for first, end in itertools.pairwise(borders):
        q, k, v = (np.asarray(array[first:end]) for array in (query, key, value))
        scores = np.einsum("qnh,knh->nqk", q, k) / 2
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        expected = np.einsum("nqk,knh->qnh", shares / shares.sum(-1, keepdims=True), v)
        np.testing.assert_allclose(found[first:end], expected, atol=2e-6)


@pytest.mark.parametrize(("num_texts", "length"), [(1, 5), (6, 26), (3, 2 * QUERY_BLOCK), (17, 256)])
def test_attention_of_texts_of_one_length_equals_that_of_any(num_texts: int, length: int) -> None:
    rng = np.random.default_rng(length)
    query, key, value = (jnp.asarray(rng.standard_normal((num_texts * length, 2, 4)), jnp.float32) for _ in range(3))
    texts = Texts(jnp.repeat(jnp.arange(num_texts), length), jnp.int32(num_texts * length), length)
    found = attend_alike(query, key, value, length, scale=0.7)
    np.testing.assert_allclose(found, attend(query, key, value, texts, scale=0.7), atol=2e-6)
    others = attend_alike(query, key.at[length:].set(jnp.nan), value, length, scale=0.7)
    np.testing.assert_array_equal(others[:length], found[:length])  # no key of another text is read


def test_an_encoder_is_no_decoder() -> None:
    with pytest.raises(CheckpointError, match="BertModel is an encoder"):
        decoder_of(open_model(DATA / "encoders" / "bert_tiny"))


@pytest.mark.parametrize("golden", [encoder_golden(name) for name in NAMES], ids=NAMES)
def test_references_differ_from_text_to_text(golden: EncoderGolden) -> None:
    first = np.stack([hidden[0] for hidden in golden.hidden])
    assert np.abs(first[1:] - first[0]).max(1).min() > 0.1
