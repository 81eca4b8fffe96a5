"""Compare matmuls and batches sharded over two devices with one device and with numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh
from jaxserve_kernels.matmul import gpu

from jaxserve.layers.linear import Embedding, Linear, Tokens
from jaxserve.layers.policy import DtypePolicy, plain
from jaxserve.quant.array import ArraySpec
from jaxserve.quant.policy import QuantPolicy
from jaxserve.sharding.rules import AxisRules, MeshShape
from jaxserve.sharding.shard_map import batch_sharded

NUM_TOKENS, NUM_INPUTS, NUM_OUTPUTS = 5, 64, 24
BY_INPUTS, BY_OUTPUTS = ("embed", "ffn"), ("ffn", "embed")
TOKENS = Tokens(jnp.int32(NUM_TOKENS))


def _policy(dtype: str) -> DtypePolicy:
    return replace(plain(jnp.dtype(dtype)), mesh=MeshShape(2), rules=_rules("ffn"))


def _rules(axis: str) -> AxisRules:
    """Return the table of a mesh that splits one axis."""
    return AxisRules((("tensor", 2),), ((axis, ("tensor",)),))


def _mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:2]), ("tensor",), axis_types=(AxisType.Auto,))


def _on_two(call: Callable[[jax.Array], jax.Array], x: jax.Array) -> tuple[np.ndarray, str]:
    """Return the result and the text of the lowered program."""
    with jax.set_mesh(_mesh()):
        lowered = jax.jit(call).lower(x)
        return np.asarray(lowered.compile()(x), np.float64), lowered.as_text()


def _inputs(dtype: str) -> jax.Array:
    random = np.random.default_rng(0)
    return jnp.asarray(random.standard_normal((NUM_TOKENS, NUM_INPUTS)), dtype)


def _linear(policy: DtypePolicy, axes: tuple[str, str]) -> Linear:
    """Return a Linear with random parameters."""
    linear = Linear(NUM_OUTPUTS, NUM_INPUTS, axes, policy, bias=True)
    random = np.random.default_rng(1)

    def draw(array: jax.Array) -> jax.Array:
        is_small = array.dtype == jnp.int8
        drawn = random.integers(-127, 128, array.shape) if is_small else random.standard_normal(array.shape)
        return jnp.asarray(drawn, array.dtype)

    graph, state = nnx.split(linear)
    filled: Linear = nnx.merge(graph, jax.tree.map(draw, state))
    return filled


@pytest.mark.parametrize("axes", [BY_INPUTS, BY_OUTPUTS])
def test_two_devices_compute_what_one_computes(axes: tuple[str, str]) -> None:
    linear, x = _linear(_policy("float32"), axes), _inputs("float32")
    found, program = _on_two(lambda x: linear(x, TOKENS), x)
    np.testing.assert_allclose(found, linear(x, TOKENS), rtol=1e-5, atol=1e-5)
    assert program.count("all_reduce") == (axes == BY_INPUTS)


def test_devices_look_up_their_own_columns_of_a_table_in_words() -> None:
    """The table is that of a TPU; rows of both shares are looked up, and of each share the first and the last."""
    quant = QuantPolicy("gguf-weight-only", platform="tpu")
    policy = replace(plain(jnp.dtype("bfloat16")), quant=quant, mesh=MeshShape(2), rules=_rules("vocab"))
    embedding = Embedding(256, 256, policy)
    embedding.keep_blocks("Q8_0")
    declared = embedding.weight.get_value()
    assert declared.values.dtype == jnp.int32
    specs = declared.map(lambda array: ArraySpec(array.shape, np.dtype(array.dtype), (None, None)))
    made = declared.format.random(np.random.default_rng(0).standard_normal(1 << 16, np.float32), specs, 1.0)
    embedding.weight.set_value(made.map(jnp.asarray))
    tokens = jnp.asarray([0, 200, 127, 128, 255, 3])
    found, program = _on_two(embedding, tokens)
    np.testing.assert_array_equal(found, np.asarray(embedding(tokens), np.float64))
    assert np.unique(found, axis=0).shape == found.shape
    assert program.count("all_reduce") == 1


def test_all_reduce_exchanges_the_activations_dtype() -> None:
    linear, x = _linear(_policy("bfloat16"), BY_INPUTS), _inputs("bfloat16")
    found, program = _on_two(lambda x: linear(x, TOKENS), x)
    np.testing.assert_allclose(found, np.asarray(linear(x, TOKENS), np.float64), rtol=2e-2, atol=0.1)
    (exchange,) = (line for line in program.partition("all_reduce")[2].splitlines() if line.lstrip().startswith("})"))
    assert f"(tensor<{NUM_TOKENS}x{NUM_OUTPUTS}xbf16>)" in exchange


def test_each_device_quantises_activations_by_the_largest_value_of_its_shard() -> None:
    linear, x = _linear(replace(_policy("float32"), quant=QuantPolicy("int8")), BY_INPUTS), _inputs("float32")
    x = x.at[:, 0].set(100.0)  # coarsens the scale of the first shard only
    assert linear.bias is not None
    weight = linear.weight.get_value()
    wide = np.asarray(weight.values, np.float64) * np.asarray(weight.scales, np.float64)[:, None]
    expected = np.asarray(linear.bias[...], np.float64)
    for shard in (slice(0, NUM_INPUTS // 2), slice(NUM_INPUTS // 2, NUM_INPUTS)):
        own = np.asarray(x[:, shard])
        scales = np.abs(own).max(1, keepdims=True) / np.float32(127)
        expected = expected + np.round(own / scales).astype(np.float64) * scales @ wide[:, shard].T
    found, program = _on_two(lambda x: linear(x, TOKENS), x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-2)
    assert np.abs(np.asarray(linear(x, TOKENS)) - expected).max() > 1, "one device uses one scale for all inputs"
    assert program.count("all_reduce") == 1


@pytest.mark.parametrize(
    ("num_rows", "num_columns"), [(6, 10), (6, 9), (5, 10)], ids=["rows", "whole columns", "all rows"]
)
def test_devices_compute_different_rows_between_two_exchanges(num_rows: int, num_columns: int) -> None:
    random = np.random.default_rng(0)
    logits, scale = jnp.asarray(random.standard_normal((num_rows, num_columns))), jnp.arange(1.0, num_rows + 1)
    seen: list[int] = []

    def compute(logits: jax.Array, by_name: dict[str, jax.Array], offset: jax.Array) -> tuple[jax.Array, jax.Array]:
        seen.append(len(logits))
        total = logits.sum(1) * by_name["scale"] + offset
        return total, (logits * by_name["scale"][:, None])[:, :3]

    def run(logits: jax.Array) -> jax.Array:
        rules = _rules("vocab") if num_columns % 2 == 0 else AxisRules()
        totals, first = batch_sharded(compute, logits, ({"scale": scale},), (jnp.float32(2),), rules)
        return jnp.concatenate((totals[:, None], first), 1)

    found, program = _on_two(run, logits)
    np.testing.assert_allclose(found, run(logits), rtol=1e-6)
    assert seen[0] == (num_rows if num_rows == 5 else 3)
    assert program.count("all_to_all") == ((num_rows, num_columns) == (6, 10))


def test_kernels_are_chosen_only_inside_shard_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "FIRST_JAX", (0, 0, 0))
    x, scales = jnp.zeros((8, 512), jnp.bfloat16), jnp.zeros((4, 256), jnp.bfloat16)
    weight = jnp.zeros((256, 512), jnp.int4)
    choices = []

    def choose(x: jax.Array) -> jax.Array:
        choices.append(gpu.grouped_choice(x, weight, scales))
        return x

    with jax.set_mesh(_mesh()):
        jax.eval_shape(choose, x)
        spec = jax.sharding.PartitionSpec()
        jax.eval_shape(jax.shard_map(choose, in_specs=spec, out_specs=spec), x)
    assert [choice is not None for choice in choices] == [False, True]
