"""The decoder against transformers on tiny checkpoints: float32, two devices and 8-bit caches."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.policy import plain
from jaxserve.layers.rope import inverse_frequencies
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.registry import decoder_config, open_model
from jaxserve.models.skeleton import make_skeleton
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape
from jaxserve.weights.loader import load_params
from tests.models.goldens import GoldenCheckpoint, golden_checkpoint, rope_goldens
from tests.models.one_row import PAGE_SIZE, new_cache, step_context

MAX_MODEL_LEN = 128


def prompt_logits(
    golden: GoldenCheckpoint, dtype: str, kv_dtype: str | None = None, *, num_devices: int = 1, fused_for: int = 0
) -> np.ndarray:
    """Logits of the last 8 prompt positions, the prompt computed in one mixed pass."""
    checkpoint = open_model(golden.path)
    config = decoder_config(checkpoint.config, checkpoint.generation_config).with_context(MAX_MODEL_LEN)
    config = config.for_devices(num_devices)
    policy = replace(plain(jnp.dtype(dtype)), fused_for=fused_for, mesh=MeshShape(num_devices))
    skeleton = make_skeleton(config, policy)
    sharding = make_sharding(config, MeshShape(num_devices))
    params = load_params(checkpoint, skeleton, sharding, lambda *_: None)
    tokens = jnp.asarray(golden.prompt_ids)
    count = len(golden.prompt_ids)
    num_pages = -(-count // PAGE_SIZE)

    @jax.jit
    def run(params: tuple[jax.Array, ...], tokens: jax.Array) -> jax.Array:
        model = skeleton.build(params)
        step = step_context(config, num_pages, jnp.int32(0), count)
        cache = new_cache(config, num_pages, kv_dtype or skeleton.policy.weights, policy.activations)
        return model.logits(model.hidden(tokens, cache, step)[0][-8:], jnp.int32(8))

    with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
        return np.asarray(run(params, tokens))


@pytest.mark.parametrize("name", ["llama3_tiny", "gpt_oss_tiny", "qwen3_next_tiny"])
def test_float32_logits_equal_transformers(name: str) -> None:
    """A plain decoder, one of experts and a hybrid, for `make check`; test_weight_formats.py has all."""
    golden = golden_checkpoint(name)
    np.testing.assert_allclose(prompt_logits(golden, "float32"), golden.logits, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.versions) for name in ("qwen2_tiny", "gpt_oss_tiny", "qwen3_next_tiny")),
        "falcon_h1_tiny",
        "gemma3n_odd_tiny",
        "gemma4_moe_odd_tiny",
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("gemma4_tiny", "qwen3_5_moe_tiny")),
    ],
)
def test_fused_matmuls_with_biases_or_experts_on_two_devices_equal_transformers(name: str) -> None:
    golden = golden_checkpoint(name)
    found = prompt_logits(golden, "float32", num_devices=2, fused_for=2)
    np.testing.assert_allclose(found, golden.logits, atol=1e-4, rtol=0)


def test_an_8_bit_cache_changes_logits_a_little() -> None:
    golden = golden_checkpoint("llama3_tiny")
    found = prompt_logits(golden, "float32", "float8_e4m3fn")
    difference = np.abs(found - golden.logits).mean() / golden.logits.std()
    assert 1e-4 < difference < 0.1


@pytest.mark.parametrize("case", rope_goldens().items(), ids=lambda case: case[0])
def test_rope_frequencies_equal_transformers(case: tuple[str, dict[str, object]]) -> None:
    golden = case[1]
    config: DecoderConfig = decoder_config({"architectures": ["LlamaForCausalLM"], **golden["config"]})  # type: ignore[dict-item]
    frequencies, factor = inverse_frequencies(config.with_context(None))
    np.testing.assert_allclose(frequencies, golden["inv_freq"], rtol=1e-6)
    assert factor == pytest.approx(golden["attention_factor"], rel=1e-7)
