"""Scores of prompt tokens, part by part: the same from a loop as from the straight-line code of GPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.policy import plain
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.models.skeleton import make_skeleton
from jaxserve.runner.inputs import Program
from jaxserve.runner.outputs.prompt_scores import score_prompts
from jaxserve.sampling.sampler import Scored, score

NUM_TOKENS, NUM_ROWS, NUM_TOPS = 20, 8, 3
"""The third part overlaps the second."""
CONFIG = DecoderConfig(
    vocab_size=96,
    hidden_size=16,
    intermediate_size=16,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    layers=(LayerConfig(),),
    max_position=64,
    norm_eps=1e-5,
    rope_theta=1e4,
    tied_embeddings=True,
)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cuda", "default"])
def test_every_part_is_scored_on_every_platform(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda **branches: branches[platform]())
    random = np.random.default_rng(0)
    skeleton = make_skeleton(CONFIG, plain(jnp.dtype("float32")))
    params = tuple(jnp.asarray(random.standard_normal(array.shape, np.float32)) for array in skeleton.arrays)
    hidden = jnp.asarray(random.standard_normal((NUM_TOKENS, CONFIG.hidden_size), np.float32))
    targets = jnp.asarray(random.integers(0, CONFIG.vocab_size, NUM_TOKENS), jnp.int32)
    field = {"targets": targets, "is_real": jnp.ones(NUM_TOKENS, jnp.int32), "num_prompt_logprobs": jnp.int32(NUM_TOPS)}
    program = Program("mixed", NUM_TOKENS, NUM_ROWS, max_pages=4, num_slots=NUM_ROWS)
    found = score_prompts(skeleton, params, lambda: hidden, field, program)
    logits = skeleton.build(params).logits(hidden, jnp.int32(NUM_TOKENS))
    expected: Scored = score(logits, targets, jnp.int32(NUM_TOPS))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), atol=1e-5)
