"""Blocks of experts: routing, independence of tokens, and how their weights are stored and loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import softmax

from jaxserve.layers.experts import Experts
from jaxserve.layers.linear import Tokens
from jaxserve.layers.policy import DtypePolicy, plain
from jaxserve.layers.routing import Routing, route, weighted_sum
from jaxserve.model_config.experts import ExpertsConfig
from jaxserve.models.registry import decoder_of, open_model
from jaxserve.models.skeleton import make_skeleton
from jaxserve.quant.formats.int8 import Int8
from jaxserve.quant.policy import QuantPolicy
from tests.models.goldens import golden_checkpoint
from tests.models.loading import load
from tests.unit.checkpoint.fp8_files import LAYOUTS, write_fp8

pytestmark = [pytest.mark.slow, pytest.mark.versions]

CONFIG = ExpertsConfig(num_experts=5, num_per_token=2, intermediate_size=32, is_normalized=True)
SCORES = np.random.default_rng(0).standard_normal((6, 5), np.float32)
FLOAT32 = plain(jnp.dtype("float32"))


def test_rows_are_sorted_by_expert_then_token_with_padding_last() -> None:
    routing = route(jnp.asarray(SCORES), jnp.int32(4), CONFIG)
    chosen = np.argsort(-SCORES, axis=1)[:4, :2]
    expected = [(expert, token) for expert in range(5) for token in range(4) if expert in chosen[token]]
    assert routing.tokens.tolist()[:8] == [token for _, token in expected]
    assert routing.group_sizes.tolist() == [(chosen == expert).sum() for expert in range(5)]
    for token, experts in enumerate(chosen):
        assert [expected[row] for row in routing.rows[token]] == [(expert, token) for expert in experts]
    assert sorted(routing.rows[4:].ravel().tolist()) == [8, 9, 10, 11]


@pytest.mark.parametrize("is_normalized", [True, False])
def test_weights_are_normalised_over_chosen_experts_or_all(is_normalized: bool) -> None:
    routing = route(jnp.asarray(SCORES), jnp.int32(6), replace(CONFIG, is_normalized=is_normalized))
    best = np.sort(softmax(SCORES, axis=1), axis=1)[:, :-3:-1]
    expected = best / best.sum(1, keepdims=True) if is_normalized else best
    np.testing.assert_allclose(routing.weights, expected, rtol=1e-6)


MANY = ExpertsConfig(num_experts=128, num_per_token=8, intermediate_size=32, is_normalized=True)
NUM_TOKENS = (1, 3, 8, 16, 24, 48, 256, 600)
"""More and fewer elements than XLA:CPU adds up in one way."""


@pytest.mark.parametrize(
    "config",
    [
        MANY,
        replace(MANY, is_normalized=False),
        replace(MANY, score="sigmoid"),
        replace(MANY, has_correction_bias=True),
        replace(MANY, score="sigmoid", has_correction_bias=True, num_groups=4, num_groups_per_token=2),
        replace(MANY, num_per_token=2, score="sparse_mixer", margin=0.1),
    ],
    ids=["softmax", "of_all", "sigmoid", "corrected", "groups", "sparse_mixer"],
)
def test_weights_of_a_token_are_alike_among_any_number_of_tokens(config: ExpertsConfig) -> None:
    random = np.random.default_rng(6)
    logits = 2 * random.standard_normal((max(NUM_TOKENS), 128), np.float32)
    correction = jnp.asarray(random.standard_normal(128, np.float32)) if config.has_correction_bias else None

    def weights(count: int, *, is_alike: bool = True) -> np.ndarray:
        compute = jax.jit(lambda x: route(x, jnp.int32(count), config, correction, is_alike=is_alike).weights)
        return np.asarray(compute(logits[:count]))

    whole = weights(max(NUM_TOKENS))
    np.testing.assert_allclose(whole, weights(max(NUM_TOKENS), is_alike=False), rtol=1e-5)
    for count in NUM_TOKENS:
        np.testing.assert_array_equal(weights(count), whole[:count])


@pytest.mark.parametrize("num_choices", [1, 2, 3, 8])
def test_weighted_sums_of_a_token_are_alike_among_any_number_of_tokens(num_choices: int) -> None:
    random, most = np.random.default_rng(7), max(NUM_TOKENS)
    made = random.standard_normal((most * num_choices, 48), np.float32)
    rows, weights = random.permutation(len(made)).reshape(most, -1), random.random((most, num_choices), np.float32)

    def compute(count: int) -> np.ndarray:
        summed = jax.jit(lambda made, rows, weights: weighted_sum(made, rows, weights, is_alike=True))
        return np.asarray(summed(made, rows[:count], weights[:count]))

    whole = compute(most)
    np.testing.assert_allclose(whole, (made[rows] * weights[:, :, None]).sum(1), rtol=1e-4, atol=1e-5)
    for count in NUM_TOKENS:
        np.testing.assert_array_equal(compute(count), whole[:count])


@pytest.mark.parametrize("num_groups", [1, 3])
def test_sigmoid_router_chooses_by_corrected_scores_and_weighs_by_plain_ones(num_groups: int) -> None:
    """Compare with DeepSeek-V3's router (arXiv 2412.19437, 2.1.2) written out token by token."""
    random = np.random.default_rng(4)
    logits, correction = random.standard_normal((7, 6), np.float32), random.standard_normal(6, np.float32)
    config = ExpertsConfig(
        num_experts=6,
        num_per_token=2,
        intermediate_size=32,
        is_normalized=True,
        score="sigmoid",
        has_correction_bias=True,
        weight_scale=2.5,
        num_groups=num_groups,
        num_groups_per_token=1,
    )
    routing = route(jnp.asarray(logits), jnp.int32(7), config, jnp.asarray(correction))
    size = 6 // num_groups
    for token, row in enumerate(logits):
        scores = 1 / (1 + np.exp(-row))
        ranks = scores + correction
        groups = [range(start, start + size) for start in range(0, 6, size)]
        allowed = max(groups, key=lambda group: sum(sorted(ranks[list(group)])[-2:]))
        chosen = sorted(allowed, key=lambda expert: -ranks[expert])[:2]
        expected = 2.5 * scores[chosen] / scores[chosen].sum()
        np.testing.assert_allclose(routing.weights[token], expected, rtol=1e-5)
        assert routing.tokens[routing.rows[token]].tolist() == [token, token]
        assert _experts_of(routing, token) == chosen


def test_large_logits_without_a_correction_are_ranked_although_their_sigmoids_are_equal() -> None:
    """A correction is added to sigmoids, so that with one the same logits tie, and the smallest expert is the best."""
    logits = jnp.asarray([[20.0, 30.0, 25.0, 40.0, 35.0, -1.0]])
    config = ExpertsConfig(
        num_experts=6, num_per_token=2, intermediate_size=32, is_normalized=False, score="sigmoid", weight_scale=0.5
    )
    routing = route(logits, jnp.int32(1), config)
    assert _experts_of(routing, 0) == [3, 4]
    np.testing.assert_allclose(routing.weights, [[0.5, 0.5]], rtol=1e-6)
    corrected = replace(config, has_correction_bias=True)
    assert _experts_of(route(logits, jnp.int32(1), corrected, jnp.zeros(6)), 0) == [0, 1]
    lifted = jnp.asarray([0.0, 0.0, 0.0, 0.0, 0.0, 2.0])
    assert _experts_of(route(logits, jnp.int32(1), corrected, lifted), 0) == [5, 0]


def _experts_of(routing: Routing, token: int) -> list[int]:
    ends = np.cumsum(routing.group_sizes)
    return [int((np.asarray(row) >= ends).sum()) for row in routing.rows[token]]


def test_a_token_depends_neither_on_its_neighbours_nor_on_padding() -> None:
    policy = replace(FLOAT32, fused_for=1)
    run = jax.jit(_filled(policy, _first_block(policy)))
    random = np.random.default_rng(2)
    own, others = random.standard_normal((3, 64), np.float32), random.standard_normal((2, 9, 64), np.float32)
    among = [np.concatenate((each[:4], own, each[4:])) for each in others]
    first, second = (np.asarray(run(jnp.asarray(x), jnp.int32(12))) for x in among)
    np.testing.assert_array_equal(first[4:7], second[4:7])
    assert (first[0] != second[0]).any()
    among[0][7:] = np.nan
    padded = np.asarray(run(jnp.asarray(among[0]), jnp.int32(7)))
    np.testing.assert_array_equal(padded[:7], first[:7])
    assert not padded[7:].any()


@pytest.mark.parametrize("quantization", ["none", "int8", "int4-weight-only"])
@pytest.mark.parametrize("fused_for", [0, 2])
def test_the_tensors_of_all_experts_are_one_parameter(quantization: str, fused_for: int) -> None:
    folder = golden_checkpoint("qwen3_moe_tiny").path
    params = load(folder, replace(plain(jnp.dtype("float32"), quantization), fused_for=fused_for))
    stored, layer = open_model(folder), "model.layers.2.mlp"
    down = params[f"{layer}.experts.down_proj.weight"]
    assert down.shape == (6, 64, 32)
    for expert in range(6):
        gate, up, own_down = (
            stored.read(f"{layer}.experts.{expert}.{name}.weight").astype(np.float32)
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        if quantization == "none":
            np.testing.assert_array_equal(down[expert], own_down)
            parts = np.split(gate, 2) + np.split(up, 2)  # of the first device, then of the second
            if fused_for:
                expected = np.concatenate((parts[0], parts[2], parts[1], parts[3]))
                np.testing.assert_array_equal(params[f"{layer}.experts.gate_up_proj.weight"][expert], expected)
        elif quantization == "int8":
            alone = Int8().quantize(own_down, None)  # type: ignore[arg-type]
            np.testing.assert_array_equal(down[expert], alone.values)
            scales = params[f"{layer}.experts.down_proj.weight_scale"][expert]
            np.testing.assert_array_equal(scales, alone.scales)
        else:
            scales = params[f"{layer}.experts.down_proj.weight_scale"][expert]
            assert scales.shape == (1, 64), "one group of 32 inputs"
            restored = down[expert].astype(np.float32) * scales.T
            assert (np.abs(restored - own_down) <= np.abs(scales.T) * 1.001).all()
    assert params[f"{layer}.gate.weight"].dtype == np.float32, "routers are not quantised"


@pytest.mark.parametrize("layout", ["channels", "fp8 blocks"])
def test_experts_stored_in_fp8_are_kept_as_other_matrices(tmp_path: Path, layout: str) -> None:
    dequantised = write_fp8(tmp_path, golden_checkpoint("olmoe_tiny").path, LAYOUTS[layout])
    decoder = decoder_of(open_model(tmp_path))
    assert decoder.stored is not None
    quant = QuantPolicy(decoder.stored.format, plain_matrices=decoder.stored.plain_matrices)
    policy = replace(FLOAT32, quant=quant, fused_for=1)
    params = load(tmp_path, policy)
    found = params["model.layers.1.mlp.experts.down_proj.weight"].astype(np.float32)
    scales = params["model.layers.1.mlp.experts.down_proj.weight_scale"]
    if layout == "channels":  # [E, out]
        found *= scales[:, :, None]
    else:  # [E, groups, out]
        found *= scales.swapaxes(1, 2).repeat(found.shape[2] // scales.shape[1], axis=2)
    for expert in range(8):
        np.testing.assert_array_equal(
            found[expert], dequantised[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"]
        )


def test_one_plain_expert_keeps_all_plain() -> None:
    folder = golden_checkpoint("olmoe_tiny").path
    policy = replace(FLOAT32, quant=QuantPolicy("int8", plain_matrices=("model.layers.0.mlp.experts.3.up_proj",)))
    leaves = {leaf.name: leaf for leaf in make_skeleton(decoder_of(open_model(folder)), policy).leaves}
    assert leaves["model.layers.0.mlp.experts.up_proj.weight"].arrays[0].dtype == np.float32
    assert leaves["model.layers.0.mlp.experts.gate_proj.weight"].arrays[0].dtype == np.int8


@pytest.mark.parametrize(
    ("quantization", "tolerance"),
    [
        ("int4-weight-only", 1e-5),
        ("int8", 0.02),
        pytest.param("int8-weight-only", 1e-5, marks=pytest.mark.slow),
        pytest.param("fp8", 0.05, marks=pytest.mark.slow),
    ],
)
def test_a_block_computes_what_its_dequantised_weights_compute(quantization: str, tolerance: float) -> None:
    """Compare one block: in a whole model rounding may change the choice of experts."""
    folder, layer = golden_checkpoint("qwen3_moe_tiny").path, "model.layers.0.mlp."
    policy = replace(plain(jnp.dtype("float32"), quantization), fused_for=1)
    small = {name.removeprefix(layer): each for name, each in load(folder, policy).items() if name.startswith(layer)}
    wide = {}
    for name in [name for name in small if name.endswith(".weight")]:
        scales = small.get(f"{name}_scale")
        wide[name] = small[name].astype(np.float32)
        if scales is not None and quantization.startswith("int4"):
            wide[name] *= scales.repeat(small[name].shape[2] // scales.shape[1], axis=1).swapaxes(1, 2)
        elif scales is not None:
            wide[name] *= scales[:, :, None]
    x = jnp.asarray(np.random.default_rng(2).standard_normal((9, 64), np.float32))
    found, expected = (
        np.asarray(jax.jit(_filled(each, of))(x, jnp.int32(9)))
        for each, of in ((policy, small), (policy.unquantized, wide))
    )
    assert np.abs(found - expected).mean() <= tolerance * np.abs(expected).mean()


def _first_block(policy: DtypePolicy) -> dict[str, np.ndarray]:
    """Return the parameters of the first layer's block, by their names in it."""
    above = "model.layers.0.mlp."
    params = load(golden_checkpoint("qwen3_moe_tiny").path, policy)
    return {name.removeprefix(above): each for name, each in params.items() if name.startswith(above)}


def _filled(policy: DtypePolicy, params: dict[str, np.ndarray]) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return the block over these parameters, with fused gate and up."""
    config = decoder_of(open_model(golden_checkpoint("qwen3_moe_tiny").path))
    assert config.experts is not None
    block = Experts(config, config.experts, policy)
    modules = {
        "gate": block.gate,
        "experts.gate_up_proj": block.experts.gate_up_proj.fused,
        "experts.down_proj": block.experts.down_proj,
    }
    for name, module in modules.items():
        declared = module.weight.get_value()
        arrays = [jnp.asarray(params[f"{name}.weight{suffix}"]) for suffix in ("", "_scale")[: len(declared.arrays)]]
        module.weight = nnx.Param(declared.with_arrays(arrays), **module.weight.get_metadata())
    return lambda x, num_tokens: block(x, Tokens(num_tokens))[0]
