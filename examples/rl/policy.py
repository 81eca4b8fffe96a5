"""The trainer's side of the policy: the model's own forward function in JAX, and Adam for the matrices that learn.

What learns is the feed-forward block of the last layer. Nothing before it needs gradients, so a step costs little more
than two forward passes, and the weights that go to the server are three matrices.

On a CPU the server multiplies and attends with native kernels, whose sums XLA adds in another order. Log-probabilities are computed by
these kernels, too, so that they have the bits that the server reported; gradients are those of XLA's operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxserve_kernels.backend import NATIVE
from jaxserve_kernels.paged_attention import Paging, ragged_layout

from jaxserve.config import Config, ModelConfig
from jaxserve.layers.attention import StepContext
from jaxserve.layers.cache import assemble, group_shapes
from jaxserve.layers.policy import plain
from jaxserve.layers.rope import query_scales, rotation, sliding_rotation
from jaxserve.models.registry import decoder_of, open_model
from jaxserve.models.skeleton import ModelSkeleton, make_skeleton
from jaxserve.runner.backend import chip_of
from jaxserve.runner.limits import make_policy
from jaxserve.sampling.sampler import score
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape
from jaxserve.weights.loader import load_params

PAGE_SIZE = 16
Weights = dict[str, Array]
"""The matrices that learn, by the names that tensors have in the model's Hugging Face directory."""


class Rollouts(NamedTuple):
    """B texts of S tokens, padded at the end, and C places of completions."""

    tokens: Array  # int32 (B, S)
    places: Array  # int32 (B, C): of the tokens of completions in their texts
    is_real: Array  # bool (B, C): False for padding


class Moments(NamedTuple):
    """The state of Adam."""

    count: Array
    first: Weights
    second: Weights


class Policy:
    """A model in float32, of which some matrices learn."""

    def __init__(self, path: Path, learning_rate: float) -> None:
        checkpoint = open_model(path)
        config = decoder_of(checkpoint)
        policy = plain(jnp.dtype("float32"))
        skeleton = make_skeleton(config, policy)
        sharding = make_sharding(config, MeshShape())
        params = load_params(checkpoint, skeleton, sharding, lambda *_: None)
        last = f"model.layers.{len(config.layers) - 1}.mlp."
        names = [leaf.name for leaf in skeleton.leaves]
        self._params = tuple(params)
        self._places = {name: index for index, name in enumerate(names) if name.startswith(last)}
        self.weights: Weights = {name: params[index] for name, index in self._places.items()}
        zeros = {name: jnp.zeros_like(weight) for name, weight in self.weights.items()}
        # Placed as a step returns it: otherwise the second step would be another program.
        self._moments = Moments(jax.device_put(jnp.int32(0), sharding.replicated), zeros, zeros)
        backend = make_policy(Config(model=ModelConfig(model=str(path))), config, chip_of(jax.devices()[0])).backend
        served = make_skeleton(config, replace(policy, backend=backend)) if backend in NATIVE else None
        logprobs = partial(_token_logprobs, skeleton, served, tuple(self._places.values()))
        self._score = jax.jit(logprobs)
        self._learn = jax.jit(partial(_learn, logprobs, learning_rate))

    def logprobs(self, rollouts: Rollouts) -> Array:
        """Return the log-probability of each token of the completions, (B, C)."""
        found: Array = self._score(self.weights, self._params, rollouts)
        return found

    def learn(self, rollouts: Rollouts, advantages: Array) -> Array:
        """Take one step of policy gradient. Returns the log-probabilities before it, (B, C). advantages: (B,)."""
        self.weights, self._moments, logprobs = self._learn(
            self.weights, self._moments, self._params, rollouts, advantages
        )
        found: Array = logprobs
        return found


def _token_logprobs(
    skeleton: ModelSkeleton,
    served: ModelSkeleton | None,
    learned: Sequence[int],
    weights: Weights,
    params: tuple[Array, ...],
    rollouts: Rollouts,
) -> Array:
    """served: the model with the kernels of the server, which have no gradients."""
    arrays = list(params)
    for index, weight in zip(learned, weights.values(), strict=True):
        arrays[index] = weight
    chosen = jnp.take_along_axis(rollouts.tokens, rollouts.places, 1).reshape(-1)
    logits = _logits(skeleton, arrays, rollouts)
    found = jnp.take_along_axis(logits, chosen[:, None], 1)[:, 0] - jax.nn.logsumexp(logits, -1)
    if served is not None:
        exact = score(_logits(served, jax.lax.stop_gradient(arrays), rollouts), chosen, jnp.int32(0)).logprobs
        found = exact + (found - jax.lax.stop_gradient(found))  # adds zero, and the gradients
    return found.reshape(rollouts.places.shape)


def _logits(skeleton: ModelSkeleton, arrays: Sequence[Array], rollouts: Rollouts) -> Array:
    """Return the logits of each token of the completions, (B * C, V)."""
    model, (rows, width) = skeleton.build(tuple(arrays)), rollouts.tokens.shape
    pages = -(-width // PAGE_SIZE)
    cache = tuple(
        assemble(group.kind, [jnp.zeros(array.shape, array.dtype) for array in group.arrays])
        for group in (
            group_shapes(each, rows * pages + 1, PAGE_SIZE, jnp.dtype("float32"), "float32")
            for each in skeleton.config.cache.groups
        )
    )
    hidden, _ = model.hidden(rollouts.tokens.reshape(-1), cache, _context(skeleton, rows, width, pages))
    before = jnp.take_along_axis(hidden.reshape(rows, width, -1), rollouts.places[..., None] - 1, 1)  # (B, C, D)
    return model.logits(before.reshape(-1, before.shape[-1]), jnp.int32(before.shape[0] * before.shape[1]))


def _context(skeleton: ModelSkeleton, rows: int, width: int, pages: int) -> StepContext:
    """Return what the layers get of a step that computes whole texts, each in pages of its own after the null page."""
    config, positions = skeleton.config, jnp.tile(jnp.arange(width), rows)
    tables = 1 + jnp.arange(rows * pages).reshape(rows, pages)
    starts = jnp.arange(rows + 1) * width
    paging = Paging(
        block_tables=tables,
        kv_lengths=jnp.full(rows, width),
        query_starts=starts,
        pages=jnp.repeat(tables, PAGE_SIZE, axis=1)[:, :width].reshape(-1),
        slots=positions % PAGE_SIZE,
        ragged=ragged_layout(starts, jnp.int32(0), num_tokens=rows * width),
    )
    return StepContext(
        rotation(config, positions),
        sliding_rotation(config, positions),
        tuple(paging for _ in config.cache.groups),
        query_scales=query_scales(config, positions),
    )


def _learn(score, learning_rate, weights, moments, params, rollouts, advantages):  # type: ignore[no-untyped-def]
    """REINFORCE: raise the log-probability of each token by its text's advantage. Adam (arXiv 1412.6980) takes the step."""

    def loss(weights: Weights) -> tuple[Array, Array]:
        logprobs = score(weights, params, rollouts)
        weighted = jnp.where(rollouts.is_real, logprobs * advantages[:, None], 0.0)
        return -weighted.sum() / rollouts.is_real.sum(), logprobs

    (_, logprobs), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
    count = moments.count + 1
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments.first, gradients)
    second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, moments.second, gradients)
    scale = learning_rate * jnp.sqrt(1 - 0.99**count) / (1 - 0.9**count)
    moved = jax.tree.map(lambda w, m, v: w - scale * m / (jnp.sqrt(v) + 1e-8), weights, first, second)
    return moved, Moments(count, first, second), logprobs
