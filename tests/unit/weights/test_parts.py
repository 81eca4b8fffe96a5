"""Devices that share a parameter: each gets its part, and every stored byte that only one of them needs is read once."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.policy import DtypePolicy, plain
from jaxserve.models.registry import decoder_config, open_model
from jaxserve.models.skeleton import ModelSkeleton, make_skeleton
from jaxserve.quant.policy import QuantPolicy
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape
from jaxserve.weights.loader import load_params
from tests.models.goldens import DATA

NUM_DEVICES = 2


def policy(quantization: str, fused_for: int) -> DtypePolicy:
    return replace(
        plain(jnp.dtype("float32")),
        quant=QuantPolicy(quantization),
        fused_for=fused_for,
        mesh=MeshShape(tensor=NUM_DEVICES),
    )


def loaded(model: str, wanted: DtypePolicy, num_devices: int) -> tuple[ModelSkeleton, list[np.ndarray], int, int]:
    """Return the arrays as one device sees them, with the bytes that were read and those that are stored."""
    checkpoint = open_model(DATA / model)
    config = decoder_config(checkpoint.config)
    skeleton, read = make_skeleton(config, wanted), list[int]()
    params = load_params(
        checkpoint, skeleton, make_sharding(config, MeshShape(tensor=num_devices)), lambda *_: None, read.append
    )
    stored = sum(
        checkpoint.tensors[name].num_stored_bytes
        for leaf in skeleton.leaves
        if not leaf.is_measured
        for name in leaf.tensors
    )
    return skeleton, [np.asarray(array) for array in jax.device_get(params)], sum(read), stored


@pytest.mark.parametrize("fused_for", [0, NUM_DEVICES])
@pytest.mark.parametrize("model", ["llama3_tiny", "mixtral_tiny", "qwen3_5_tiny", "qwen3_next_tiny", "qwen4_exp_tiny"])
def test_each_byte_is_read_once_for_devices_that_share_it(model: str, fused_for: int) -> None:
    _, split, num_read, num_stored = loaded(model, policy("none", fused_for), NUM_DEVICES)
    _, whole, _, _ = loaded(model, policy("none", fused_for), 1)
    assert num_read == num_stored
    for one, other in zip(split, whole, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("quantization", ["int8-weight-only", "fp8-block-weight-only"])
def test_rows_are_quantised_alike_whether_one_device_holds_them_or_two(quantization: str) -> None:
    """Each device reads whole rows where inputs are split, since a scale is for all of a row, or a group of its inputs."""
    skeleton, split, num_read, num_stored = loaded("llama3_tiny", policy(quantization, 0), NUM_DEVICES)
    _, whole, _, _ = loaded("llama3_tiny", policy(quantization, 0), 1)
    by_input = sum(
        4 * int(np.prod(leaf.shape))
        for leaf in skeleton.leaves
        if leaf.name.endswith(("o_proj.weight", "down_proj.weight"))
    )
    assert num_stored < num_read <= num_stored + by_input
    for one, other in zip(split, whole, strict=True):
        np.testing.assert_array_equal(one, other)


def test_no_host_waits_for_others_to_place_scales_that_will_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts load parameters in an order of their own; `jax.device_put` to a sharding compares the arrays of all hosts."""
    put = jax.device_put

    def alone(array: np.ndarray, device: object, **options: bool) -> jax.Array:
        assert isinstance(device, jax.Device)
        return put(array, device, **options)

    monkeypatch.setattr(jax, "device_put", alone)
    scaled = replace(policy("none", 0), kv_scales="numbers")
    skeleton, split, _, _ = loaded("llama3_tiny", scaled, NUM_DEVICES)
    for leaf, array in zip(skeleton.leaves, split, strict=True):
        assert not leaf.is_measured or (array.shape == leaf.shape and (array == 1).all())
    assert any(leaf.is_measured for leaf in skeleton.leaves)
