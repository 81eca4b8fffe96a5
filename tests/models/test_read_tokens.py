"""A forward pass whose caller names the tokens that it reads computes the end of the last layer for those tokens only."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from jaxserve.config import CompileConfig, Config, ModelConfig
from jaxserve.layers.policy import plain
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.models.decoder import Forward, ReadTokens
from jaxserve.models.registry import decoder_of, open_model
from jaxserve.models.skeleton import make_skeleton
from jaxserve.runner.backend import chip_of
from jaxserve.runner.limits import make_policy
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape
from jaxserve.weights.loader import load_params
from tests.models.goldens import golden_checkpoint
from tests.models.one_row import PAGE_SIZE, new_cache, step_context

NUM_TOKENS, NUM_LAYERS, HIDDEN_SIZE, INTERMEDIATE_SIZE = 24, 3, 16, 40
NAMES: Final = (
    "llama3_tiny",
    "qwen3_next_tiny",
    *(
        pytest.param(name, marks=pytest.mark.exhaustive)
        for name in ("cohere_tiny", "nemotron_h_tiny", "gemma3n_tiny", "deepseek_v4_tiny")
    ),
)
"""A dense model and experts after attention in a hybrid; parallel blocks, a last layer of one block, AltUp with inputs of each layer, hyper-connections."""
TOLERANCE: Final = {"gemma3n_tiny": 1e-5}
"""XLA rounds the sums of AltUp's streams by the number of tokens: a decode step differs from a chunk as much."""


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("name", NAMES)
def test_tokens_that_are_read_have_the_bits_of_a_pass_that_reads_all(name: str) -> None:
    golden = golden_checkpoint(name)
    checkpoint = open_model(golden.path)
    decoder = decoder_of(checkpoint).with_context(128).for_devices(1)
    config = Config(model=ModelConfig(model=str(golden.path)), compile=CompileConfig(cpu_kernels="native"))
    policy = make_policy(config, decoder, chip_of(jax.devices()[0]))
    skeleton, sharding = make_skeleton(decoder, policy), make_sharding(decoder, MeshShape())
    params = load_params(checkpoint, skeleton, sharding, lambda *_: None)
    tokens = jnp.asarray(golden.prompt_ids)
    count = len(golden.prompt_ids)
    num_pages = -(-count // PAGE_SIZE)
    places = np.array([3, count - 1, 0])  # the last one is padding

    @jax.jit
    def run(params: tuple[Array, ...], tokens: Array) -> tuple[Array, Array, Array]:
        def forward(read: ReadTokens | None) -> Forward:
            step = step_context(decoder, num_pages, jnp.int32(0), count)
            cache = new_cache(decoder, num_pages, jnp.float32, policy.activations)
            return skeleton.build(params).forward(tokens, cache, step, read=read)

        some = forward(ReadTokens(jnp.asarray(places), jnp.int32(2)))
        return some.hidden, some.all_hidden(), forward(None).hidden

    some, later, whole = map(np.asarray, run(params, tokens))
    np.testing.assert_allclose(some[:2], whole[places[:2]], rtol=0, atol=TOLERANCE.get(name, 0))
    np.testing.assert_array_equal(later, whole)


def test_the_last_feed_forward_block_has_the_rows_that_are_read() -> None:
    config = DecoderConfig(
        vocab_size=96,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=INTERMEDIATE_SIZE,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        layers=(LayerConfig(),) * NUM_LAYERS,
        max_position=64,
        norm_eps=1e-5,
        rope_theta=1e4,
    )
    skeleton = make_skeleton(config, replace(plain(jnp.dtype("float32")), backend="reference"))

    def forward(params: tuple[Array, ...], tokens: Array, places: Array) -> Array:
        step, cache = step_context(config, 2, jnp.int32(0), NUM_TOKENS), new_cache(config, 2, jnp.float32, jnp.float32)
        return skeleton.build(params).hidden(tokens, cache, step, read=ReadTokens(places, jnp.int32(2)))[0]

    params = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in skeleton.arrays)
    tokens, places = (jax.ShapeDtypeStruct((count,), jnp.int32) for count in (NUM_TOKENS, 2))
    hlo = jax.jit(forward).lower(params, tokens, places).as_text("hlo")
    found = Counter(re.findall(rf"f32\[(\d+),{INTERMEDIATE_SIZE}\]\S* dot\(", hlo))
    assert found == {str(NUM_TOKENS): 2 * (NUM_LAYERS - 1), "2": 2}
