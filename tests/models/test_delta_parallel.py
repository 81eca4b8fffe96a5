"""Gated delta nets whose heads several devices share, from the input projections to the output projection."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import CompileConfig, Config, ModelConfig, ParallelConfig
from jaxserve.layers.policy import plain
from jaxserve.models.registry import decoder_config, read_decoder
from jaxserve.models.skeleton import make_skeleton
from jaxserve.runner.backend import Chip
from jaxserve.runner.limits import make_limits, make_policy
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape, cache_shards
from tests.models.goldens import golden_checkpoint
from tests.models.loading import load
from tests.models.random_checkpoint import write_random
from tests.models.tiny_model import TinyModel

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 8, 16, 8, 12
QWEN3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": VALUE_HEADS,
    "linear_key_head_dim": KEY_DIM,
    "linear_value_head_dim": VALUE_DIM,
    "max_position_embeddings": 256,
}
QWEN3_NEXT = QWEN3_5 | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
TOKENS = np.random.default_rng(1).integers(3, 300, 37)
"""A chunk of the recurrent kernels, and a part of the next one."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "quantization", "sizes"),
    [(QWEN3_5, "int8-weight-only", (2, 8)), (QWEN3_NEXT, "none", (4,))],
    ids=["separate", "fused"],
)
def test_devices_that_share_heads_generate_the_tokens_of_one(
    tmp_path: Path, config: dict[str, Any], quantization: str, sizes: tuple[int, ...]
) -> None:
    """Projections that the checkpoint has separately, here with a scale for each row, or by key head (Qwen3-Next)."""
    settings: dict[str, Any] = {"dtype": "float32", "quantization": quantization}
    path = write_random(tmp_path, config)
    alone = TinyModel(path, **settings)
    expected = alone.logits(TOKENS)
    tokens = alone.greedy(expected[-1], 8)
    for size in sizes:
        model = TinyModel(path, tensor_parallel_size=size, **settings)
        found = model.logits(TOKENS)
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)
        assert model.greedy(found[-1], 8) == tokens


@pytest.mark.parametrize("quantization", ["none", "int8", "int4-weight-only", "fp8-block-weight-only"])
@pytest.mark.parametrize("num_devices", [2, 8])
def test_rows_and_channels_are_grouped_by_device(tmp_path: Path, quantization: str, num_devices: int) -> None:
    """Scales go with their rows, and no other array of the layer's inputs moves."""
    path, policy = write_random(tmp_path, QWEN3_5), plain(jnp.dtype("float32"), quantization)
    whole, grouped = load(path, policy), load(path, replace(policy, mesh=MeshShape(num_devices)))
    keys, values = KEY_HEADS * KEY_DIM, VALUE_HEADS * VALUE_DIM
    parts = np.split(np.arange(2 * keys + values), [keys, 2 * keys])
    shares = [np.split(part, num_devices) for part in parts]
    order = np.concatenate([own[device] for device in range(num_devices) for own in shares])
    moved = [name for name in whole if "in_proj_qkv" in name or "conv1d" in name]
    assert len(moved) == (2 if quantization == "none" else 3)
    for name, array in whole.items():
        if "linear_attn" not in name or "out_proj" in name:
            continue  # inputs that devices split have other groups
        axis = array.shape.index(len(order)) if name in moved else 0
        expected = np.take(array, order, axis) if name in moved else array
        np.testing.assert_array_equal(grouped[name], expected)


@pytest.mark.parametrize("config", [QWEN3_5, QWEN3_NEXT], ids=["separate", "fused"])
@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_each_device_holds_its_share_of_weights_and_states(config: dict[str, Any], num_devices: int) -> None:
    decoder, shape = decoder_config(config), MeshShape(num_devices)
    policy = replace(plain(jnp.dtype("float32")), mesh=shape)
    sharding = make_sharding(decoder, shape)
    skeleton = make_skeleton(decoder, policy)
    shared = [leaf for leaf in skeleton.leaves if "linear_attn" in leaf.name and "norm" not in leaf.name]
    assert len(shared) == (6 if config is QWEN3_NEXT else 8)
    for leaf in shared:
        for array in leaf.arrays:
            own = sharding.place(array.axes).shard_shape(array.shape)
            assert np.prod(own) * num_devices == np.prod(array.shape), leaf.name


@pytest.mark.parametrize("name", ["kimi_linear_tiny", "qwen3_next_tiny", "lfm2_tiny", "falcon_h1_tiny"])
@pytest.mark.parametrize("num_devices", [2, 4])
def test_a_cache_is_charged_for_what_it_takes_on_each_device(name: str, num_devices: int) -> None:
    """States may be split over more devices than pages, which all devices have of latent attention."""
    path = golden_checkpoint(name).path
    config = Config(
        model=ModelConfig(model=str(path)),
        parallel=ParallelConfig(tensor_parallel_size=num_devices),
        compile=CompileConfig(cpu_kernels="xla"),
    )
    decoder = read_decoder(path)[0].for_devices(num_devices)
    limits = make_limits(config, decoder, make_policy(config, decoder, Chip("cpu", None)), "cpu", 1 << 20)
    sharding = make_sharding(decoder, MeshShape(num_devices))
    taken = sum(
        math.prod(sharding.place(array.axes).shard_shape(array.shape)) * jnp.dtype(array.dtype).itemsize
        for group in limits.shapes or ()
        for array in group.arrays
    )
    assert limits.cache.num_state_slots
    assert taken == limits.cache.num_bytes // cache_shards(decoder, sharding.rules)


def test_devices_that_do_not_divide_the_key_heads_hold_all_of_them() -> None:
    decoder, shape = decoder_config(QWEN3_5 | {"linear_num_key_heads": 2}), MeshShape(4)
    skeleton = make_skeleton(decoder, replace(plain(jnp.dtype("float32")), mesh=shape))
    sharding = make_sharding(decoder, shape)
    (qkv,) = [leaf for leaf in skeleton.leaves if leaf.name.endswith("in_proj_qkv.weight")]
    assert qkv.layout is None
    (array,) = qkv.arrays
    assert sharding.place(array.axes).shard_shape(array.shape) == array.shape
