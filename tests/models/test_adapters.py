"""Adapters: logits equal PEFT's, whether matmuls are quantised, fused or sharded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxserve_kernels import native

from jaxserve.checkpoint.adapted import with_adapters
from jaxserve.config import Config, ModelConfig
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.executor.adapters import adapters_config, open_adapters
from jaxserve.layers.linear import LowRank, Tokens
from jaxserve.layers.policy import DtypePolicy, plain
from jaxserve.models.registry import decoder_of, open_model
from jaxserve.models.skeleton import make_skeleton
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape
from jaxserve.weights.loader import load_params
from tests.models.goldens import DATA, adapter_goldens
from tests.models.one_row import PAGE_SIZE, new_cache, step_context
from tests.unit.checkpoint.checkpoint_files import write_safetensors

pytestmark = [pytest.mark.slow]

RANK = 16
PLAIN = plain(jnp.dtype("float32"))
CASES = {
    "llama3_tiny": ("base", "first", "second"),
    "phi3_tiny": ("base", "fused"),
    "qwen3_moe_tiny": ("experts", "down"),
    "gpt_oss_tiny": ("experts",),
    "falcon_h1_tiny": ("all",),
    "falcon_mamba_tiny": ("states",),
    "granitemoehybrid_tiny": ("all",),
    "jamba_tiny": ("all",),
    "lfm2_tiny": ("all", "states"),
    "nemotron_h_tiny": ("all",),
    "qwen3_5_tiny": ("all",),
    "qwen3_next_tiny": ("all", "states"),
    "zaya_tiny": ("all",),
}
IN_ALL_VERSIONS = ("llama3_tiny", "gpt_oss_tiny", "qwen3_next_tiny")
"""Dense layers, experts and states."""


def logits(
    model: str, chosen: Sequence[str], policy: DtypePolicy, num_devices: int = 1, max_loras: int | None = None
) -> list[np.ndarray]:
    """Return (8, V) for each chosen adapter, the logits of the last 8 prompt positions; one program computes them."""
    goldens = adapter_goldens(model)
    names = [name for name in goldens if name != "base"]
    modules = ",".join(f"{name}={goldens[name].path}" for name in names)
    checkpoint = open_model(DATA / model)
    decoder = decoder_of(checkpoint)
    settings = ModelConfig(model=model, lora_modules=modules, max_loras=max_loras)
    adapters = open_adapters(Config(model=settings), decoder, checkpoint.config)
    room = adapters_config(adapters, settings, decoder)
    assert room is not None
    assert (room.count, room.rank) == (max_loras or len(names), 16)
    skeleton, sharding = make_skeleton(decoder, policy, room), make_sharding(decoder, MeshShape(num_devices))
    places = [*adapters, *[None] * (room.count - len(adapters))]
    tensors = with_adapters(checkpoint, places, room.rank, room.modules)
    params = load_params(tensors, skeleton, sharding, lambda *_: None)
    places_of_ranks = 1 + jnp.arange(room.num_ranks) // room.rank

    @jax.jit
    def compute(params: tuple[jax.Array, ...], prompt: jax.Array, number: jax.Array) -> jax.Array:
        built, num_pages = skeleton.build(params), -(-len(prompt) // PAGE_SIZE)
        own = jnp.broadcast_to(number == places_of_ranks, (len(prompt), room.num_ranks))
        step = step_context(decoder, num_pages, jnp.int32(0), len(prompt))._replace(adapters=own)
        cache = new_cache(decoder, num_pages, policy.activations, policy.activations)
        hidden, _ = built.hidden(prompt, cache, step)
        return built.logits(hidden[-8:], jnp.int32(8))

    numbers = ["base", *names]
    with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
        found = [
            compute(params, jnp.asarray(goldens[each].prompt_ids), jnp.int32(numbers.index(each))) for each in chosen
        ]
    return list(map(np.asarray, found))


@pytest.mark.parametrize(
    "model", [pytest.param(each, marks=[pytest.mark.versions] if each in IN_ALL_VERSIONS else []) for each in CASES]
)
@pytest.mark.parametrize("fused_for", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_adapter_logits_equal_peft(model: str, fused_for: int) -> None:
    names = CASES[model]
    for name, found in zip(names, logits(model, names, replace(PLAIN, fused_for=fused_for)), strict=True):
        np.testing.assert_allclose(found, adapter_goldens(model)[name].logits, atol=1e-4, rtol=0, err_msg=name)


@pytest.mark.parametrize("fused_for", [pytest.param(0, marks=pytest.mark.exhaustive), 2])
@pytest.mark.parametrize(
    ("model", "adapter"),
    [
        ("llama3_tiny", "second"),
        pytest.param("qwen3_5_tiny", "all", marks=pytest.mark.exhaustive),
        pytest.param("qwen3_next_tiny", "states", marks=pytest.mark.versions),
    ],
)
@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_adapters_are_sharded_with_the_model(model: str, adapter: str, fused_for: int) -> None:
    (found,) = logits(model, [adapter], replace(PLAIN, fused_for=fused_for, mesh=MeshShape(2)), num_devices=2)
    np.testing.assert_allclose(found, adapter_goldens(model)[adapter].logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("quantization", "most"), [("int8-weight-only", 0.5), ("fp8-block-weight-only", 2.5), ("nvfp4-weight-only", 6)]
)
def test_adapters_of_quantised_weights_are_not_quantised(quantization: str, most: float) -> None:
    """A quantised model with an adapter is about as far from float32 as without."""
    coarse = plain(jnp.dtype("float32"), quantization)
    names = ("base", "second")
    away = [
        np.abs(found - adapter_goldens("llama3_tiny")[name].logits).max()
        for name, found in zip(names, logits("llama3_tiny", names, coarse), strict=True)
    ]
    assert 0 < away[0] < most
    assert away[1] < 3 * away[0]


@pytest.mark.versions
@pytest.mark.skipif(native.register() is None, reason="needs the native kernels")
def test_native_kernels_read_only_the_adapters_that_rows_use() -> None:
    adapters = LowRank(6, 32, (None, None), replace(PLAIN, backend="native"), 2 * RANK)
    graph, state = nnx.split(adapters)
    is_first = jnp.arange(2 * RANK) < RANK
    broken = jax.tree.map(lambda each: jnp.where(is_first[:, None], jnp.nan, jnp.ones(each.shape)), state)
    own = jnp.array([[False, True], [False, False], [True, False]]).repeat(RANK, 1)
    x, y = jnp.ones((3, 32)), jnp.arange(18.0).reshape(3, 6)
    found = np.asarray(nnx.merge(graph, broken).added_to(y, x, Tokens(jnp.int32(3), own)))
    assert found[0].tolist() == [each + 32 * RANK for each in y[0]] and found[1].tolist() == y[1].tolist()
    assert np.isnan(found[2]).all()


@pytest.mark.versions
@pytest.mark.skipif(native.register() is None, reason="needs the native kernels")
@pytest.mark.parametrize("num_outputs", [6, 144])
def test_what_an_adapter_adds_to_a_row_does_not_depend_on_other_rows(num_outputs: int) -> None:
    adapters = LowRank(num_outputs, 48, (None, None), replace(PLAIN, backend="native"), 2 * RANK)
    graph, state = nnx.split(adapters)
    random = np.random.default_rng(0)
    served = nnx.merge(
        graph, jax.tree.map(lambda each: jnp.asarray(random.standard_normal(each.shape), each.dtype), state)
    )
    x, y = (jnp.asarray(random.standard_normal((11, size)), jnp.float32) for size in (48, num_outputs))
    own = jnp.asarray(np.arange(2 * RANK) // RANK == np.array([0, 1, 0, 0, 2, 0, 1, 0, 0, 1, 0])[:, None])  # 2: none
    together = np.asarray(served.added_to(y, x, Tokens(jnp.int32(11), own)))
    for row in range(11):
        alone = served.added_to(y[row][None], x[row][None], Tokens(jnp.int32(1), own[row][None]))
        assert np.asarray(alone)[0].tobytes() == together[row].tobytes()


def test_reserved_places_change_no_logits() -> None:
    golden = adapter_goldens("llama3_tiny")["second"]
    (found,) = logits("llama3_tiny", ["second"], PLAIN, max_loras=3)
    np.testing.assert_allclose(found, golden.logits, atol=2e-4)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_loras": 1, "lora_modules": "a=x,b=y"}, "--max-loras 1: --lora-modules has 2 adapters"),
        ({"max_lora_rank": 8}, "--max-lora-rank 8: needs --max-loras"),
    ],
)
def test_places_that_contradict_the_adapters_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ModelConfig(model="any", **settings)


def test_an_adapter_of_another_model_is_rejected(tmp_path: Path) -> None:
    source = adapter_goldens("llama3_tiny")["first"].path
    (tmp_path / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    module = "base_model.model.model.layers.7.self_attn.q_proj"
    tensors = {
        f"{module}.lora_A.weight": np.ones((4, 64), np.float32),
        f"{module}.lora_B.weight": np.ones((64, 4), np.float32),
    }
    write_safetensors(tmp_path / "adapter_model.safetensors", tensors)
    checkpoint = open_model(DATA / "llama3_tiny")
    decoder = decoder_of(checkpoint)
    settings = ModelConfig(model="any", lora_modules=f"other={tmp_path}")
    adapters = open_adapters(Config(model=settings), decoder, checkpoint.config)
    room = adapters_config(adapters)
    assert room is not None
    skeleton = make_skeleton(decoder, PLAIN, room)
    with pytest.raises(CheckpointError, match=r"layers\.7\.self_attn\.q_proj\.lora_A\.weight' is not expected"):
        load_params(
            with_adapters(checkpoint, adapters, room.rank),
            skeleton,
            make_sharding(decoder, MeshShape()),
            lambda *_: None,
        )
