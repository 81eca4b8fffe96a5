"""Matrices of a model that int4 stores in 4 bits, and their groups."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import pytest

from jaxserve.layers.policy import plain
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.models.skeleton import make_skeleton
from jaxserve.quant.array import ArraySpec
from jaxserve.quant.policy import QuantPolicy
from jaxserve.sharding.mesh import axis_rules
from jaxserve.sharding.rules import MeshShape
from tests.models.loading import array_specs

MODEL = DecoderConfig(
    vocab_size=500,
    hidden_size=576,
    intermediate_size=1536,
    num_heads=8,
    num_kv_heads=4,
    head_dim=20,
    layers=(LayerConfig(),),
    max_position=64,
    norm_eps=1e-5,
    rope_theta=1e4,
)


def leaves(num_devices: int = 1, group_size: int = 128) -> dict[str, ArraySpec]:
    quant = QuantPolicy("int4-weight-only", group_size)
    policy = replace(plain(jnp.dtype("bfloat16")), quant=quant, mesh=MeshShape(num_devices))
    found = array_specs(make_skeleton(MODEL, policy))
    return {name.removeprefix("model.layers.0."): array for name, array in found.items()}


def groups(name: str, **options: int) -> int:
    found = leaves(**options)
    weight, scale = found[f"{name}.weight"], found[f"{name}.weight_scale"]
    assert weight.dtype == jnp.int4 and scale.dtype == jnp.bfloat16
    assert scale.shape[1] == weight.shape[0] and scale.axes == weight.axes[::-1]
    return weight.shape[1] // scale.shape[0]


def test_groups_are_the_largest_that_divide_the_inputs() -> None:
    assert groups("mlp.down_proj") == 128  # 1536
    assert groups("mlp.up_proj") == groups("self_attn.q_proj") == 64  # 576
    assert groups("self_attn.o_proj") == 32  # 160
    assert groups("mlp.down_proj", group_size=64) == 64


def test_no_group_is_on_two_devices() -> None:
    assert groups("mlp.down_proj", num_devices=4) == 128  # 384 inputs each
    assert groups("mlp.down_proj", num_devices=8) == 64  # 192
    assert groups("mlp.up_proj", num_devices=8) == 64, "every device has all of these inputs"
    assert groups("mlp.down_proj", num_devices=5) == 128, "what does not divide is not split"


def test_tables_and_matrices_that_no_group_divides_have_eight_bits() -> None:
    found = leaves(num_devices=2)
    assert axis_rules(MODEL, MeshShape(tensor=2)).mesh_axes("heads")
    for name in ("self_attn.o_proj", "model.embed_tokens", "lm_head"):  # o_proj: 80 inputs each
        assert found[f"{name}.weight"].dtype == jnp.int8
        assert found[f"{name}.weight_scale"].shape == found[f"{name}.weight"].shape[:1]
        assert found[f"{name}.weight_scale"].dtype == jnp.float32


@pytest.mark.parametrize("name", ["mlp.down_proj.weight", "mlp.down_proj.weight_scale", "model.embed_tokens.weight"])
def test_two_4_bit_values_take_a_byte(name: str) -> None:
    expected = {"mlp.down_proj.weight": 576 * 1536 // 2, "mlp.down_proj.weight_scale": 12 * 576 * 2}
    assert leaves()[name].num_bytes == expected.get(name, 500 * 576)
