"""FusedLinear: row layout per device, in every format, and the devices that use it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxserve_kernels import native

from jaxserve.config import Config, ModelConfig, ParallelConfig
from jaxserve.layers.fused import FusedLinear
from jaxserve.layers.linear import Linear, Tokens, apply_together
from jaxserve.layers.policy import plain
from jaxserve.models.registry import decoder_of, open_model
from jaxserve.quant.policy import QuantPolicy
from jaxserve.runner.backend import Chip
from jaxserve.runner.limits import make_policy
from tests.models.goldens import golden_checkpoint
from tests.models.loading import load
from tests.unit.checkpoint.fp8_files import LAYOUTS, write_fp8

UNFUSED = plain(jnp.dtype("float32"))
QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")


@pytest.mark.parametrize("quantization", ["none", "int8", "fp8-weight-only", "int4-weight-only"])
@pytest.mark.parametrize("num_devices", [1, 2])
def test_each_device_holds_the_rows_that_it_holds_without_fusion(quantization: str, num_devices: int) -> None:
    folder, policy = golden_checkpoint("qwen2_tiny").path, plain(jnp.dtype("float32"), quantization)
    unfused, fused = load(folder, policy), load(folder, replace(policy, fused_for=num_devices))
    kinds = ["weight"] if quantization == "none" else ["weight", "weight_scale"]
    expected = {f"self_attn.qkv_proj.{kind}": [f"self_attn.{name}.{kind}" for name in QKV] for kind in (*kinds, "bias")}
    expected |= {f"mlp.gate_up_proj.{kind}": [f"mlp.{name}.{kind}" for name in GATE_UP] for kind in kinds}
    for name, parts in expected.items():
        axis = 1 if quantization.startswith("int4") and name.endswith("weight_scale") else 0
        found = np.split(fused.pop(f"model.layers.1.{name}"), num_devices, axis)
        alone = [np.split(unfused.pop(f"model.layers.1.{part}"), num_devices, axis) for part in parts]
        for device in range(num_devices):
            expected_here = np.concatenate([shares[device] for shares in alone], axis)
            np.testing.assert_array_equal(found[device], expected_here)
    assert {name for name in fused if ".1." in name} == {name for name in unfused if ".1." in name}, (
        "nothing else moved"
    )


def test_weights_stored_in_fp8_are_fused_without_rounding(tmp_path: Path) -> None:
    dequantised = write_fp8(tmp_path, golden_checkpoint("llama3_tiny").path, LAYOUTS["channels"])
    params = load(
        tmp_path, replace(UNFUSED, quant=QuantPolicy("fp8", plain_matrices=("model.embed_tokens",)), fused_for=1)
    )
    found = params["model.layers.0.mlp.gate_up_proj.weight"].astype(np.float32)
    found *= params["model.layers.0.mlp.gate_up_proj.weight_scale"][:, None]
    np.testing.assert_array_equal(
        found, np.concatenate([dequantised[f"model.layers.0.mlp.{name}.weight"] for name in GATE_UP])
    )


def test_a_plain_matrix_keeps_those_fused_with_it_plain() -> None:
    folder = golden_checkpoint("qwen2_tiny").path
    plain_module = "model.layers.1.self_attn.k_proj"
    policy = replace(UNFUSED, quant=QuantPolicy("int8", plain_matrices=(plain_module,)), fused_for=1)
    params, stored = load(folder, policy), load(folder, UNFUSED)
    found = params["model.layers.1.self_attn.qkv_proj.weight"]
    parts = [stored[f"model.layers.1.self_attn.{name}.weight"] for name in QKV]
    np.testing.assert_array_equal(found, np.concatenate(parts))
    assert params["model.layers.0.self_attn.qkv_proj.weight"].dtype == np.int8


@pytest.mark.parametrize(("chip", "expected"), [(Chip("gpu", (8, 0)), 2), (Chip("tpu"), 0)], ids=["gpu", "tpu"])
def test_gpus_fuse_for_the_devices_that_share_the_layers(chip: Chip, expected: int) -> None:
    decoder = decoder_of(open_model(golden_checkpoint("llama3_tiny").path))
    config = Config(model=ModelConfig(model="any"), parallel=ParallelConfig(tensor_parallel_size=2))
    assert make_policy(config, decoder, chip).fused_for == expected
    alone = Config(model=ModelConfig(model="any"))
    assert make_policy(alone, decoder, Chip("cpu")).fused_for == 0


@pytest.mark.parametrize("num_ranks", [0, 4])
@pytest.mark.parametrize("quantization", ["none", "int8-weight-only"])
def test_a_native_kernel_computes_matmuls_of_one_input_in_one_call(quantization: str, num_ranks: int) -> None:
    if not native.has("jaxserve_matmul"):
        pytest.skip("no native kernels")
    policy = replace(plain(jnp.dtype("float32"), quantization), backend="native")
    counts = {"q_proj": 48, "k_proj": 16, "v_proj": 16}
    make = partial(Linear, in_dim=64, axes=("heads", "embed"), policy=policy, bias=True)
    fused = FusedLinear(counts, make, policy, num_units=1)
    modules = [getattr(fused, name) for name in counts]
    random = np.random.default_rng(0)
    for module in modules:
        if num_ranks:
            module.adapt(num_ranks)
        for parameter in jax.tree.leaves(nnx.state(module), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
            parameter.set_value(jax.tree.map(partial(_random_like, random), parameter.get_value()))
    x = jnp.asarray(random.normal(size=(5, 64)), jnp.float32)
    adapters = jnp.repeat(jnp.arange(5) % 2 == 0, num_ranks).reshape(5, num_ranks) if num_ranks else None
    tokens = Tokens(jnp.int32(5), adapters)
    for y, module in zip(fused(x, tokens), modules, strict=True):
        np.testing.assert_array_equal(y, module(x, tokens))
    program = jax.jit(lambda x: fused(x, tokens)).lower(x).as_text()
    assert program.count("custom_call @jaxserve_matmul") == 1
    assert program.count("custom_call @jaxserve_add_low_rank") == bool(num_ranks)


def test_matmuls_of_several_formats_are_one_call_for_each() -> None:
    if not native.has("jaxserve_matmul"):
        pytest.skip("no native kernels")
    quantized = replace(plain(jnp.dtype("float32"), "int8-weight-only"), backend="native")
    random = np.random.default_rng(0)
    policies = (quantized, quantized.unquantized, quantized, quantized.unquantized)
    linears = [Linear(16 * (i + 1), 64, ("heads", "embed"), policy) for i, policy in enumerate(policies)]
    for linear in linears:
        linear.weight.set_value(jax.tree.map(partial(_random_like, random), linear.weight.get_value()))
    x, tokens = jnp.asarray(random.normal(size=(5, 64)), jnp.float32), Tokens(jnp.int32(5))
    for y, linear in zip(apply_together(linears, x, tokens), linears, strict=True):
        np.testing.assert_array_equal(y, linear(x, tokens))
    program = jax.jit(lambda x: apply_together(linears, x, tokens)).lower(x).as_text()
    assert program.count("custom_call @jaxserve_matmul") == 2


def _random_like(random: np.random.Generator, array: jax.Array) -> jax.Array:
    return jnp.asarray(random.normal(size=array.shape) * 8).astype(array.dtype)
