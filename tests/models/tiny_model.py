"""A checkpoint's decoder under the server's own settings, with one row of pages and without an engine.

An engine compiles its sampler with every model for ten seconds; what a test says of a model's numbers needs none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxserve.config import CompileConfig, Config, CpuKernels, ModelConfig, ParallelConfig
from jaxserve.layers.cache import Cache, StatePool
from jaxserve.models.registry import decoder_of, open_model
from jaxserve.models.skeleton import make_skeleton
from jaxserve.runner.backend import chip_of
from jaxserve.runner.cache_sizes import with_cache_groups
from jaxserve.runner.limits import kv_cache_dtype, make_policy
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape
from jaxserve.weights.loader import load_params
from tests.models.one_row import PAGE_SIZE, new_cache, step_context

NUM_PAGES = 8
NUM_LOGITS = 8


class TinyModel:
    """One row of tokens, as long as it grows."""

    def __init__(
        self, path: Path, *, cpu_kernels: CpuKernels = "xla", tensor_parallel_size: int = 1, **model: Any
    ) -> None:
        """model: other settings than the defaults of `ModelConfig`."""
        config = Config(
            model=ModelConfig(model=str(path), **model),
            parallel=ParallelConfig(tensor_parallel_size=tensor_parallel_size),
            compile=CompileConfig(cpu_kernels=cpu_kernels),
        )
        checkpoint = open_model(path)
        decoder = decoder_of(checkpoint).with_context(NUM_PAGES * PAGE_SIZE).for_devices(tensor_parallel_size)
        decoder = with_cache_groups(config, decoder)
        self.policy = make_policy(config, decoder, chip_of(jax.devices()[0]))
        skeleton = make_skeleton(decoder, self.policy)
        sharding = make_sharding(decoder, MeshShape(tensor_parallel_size))
        self._mesh = sharding.mesh.abstract_mesh
        self._params = load_params(checkpoint, skeleton, sharding, lambda *_: None)
        # Placed as the steps return it: otherwise the second step would be another program.
        kv_dtype = kv_cache_dtype(config, "cpu")
        self._cache = new_cache(decoder, NUM_PAGES, kv_dtype, self.policy.activations, sharding)
        self._length = 0

        self.experts: list[np.ndarray] = []
        """Experts `[L, T, k]` of the tokens of each call, in layers with experts."""

        def compute(
            params: tuple[Array, ...], cache: Cache, tokens: Array, first: Array
        ) -> tuple[Array, list[Array], Cache]:
            step = step_context(decoder, NUM_PAGES, first, len(tokens))
            model = skeleton.build(params)
            hidden, cache, experts, *_ = model.forward(tokens, cache, step)
            last = hidden[-NUM_LOGITS:]
            return model.logits(last, jnp.int32(len(last))), experts, cache

        places = jax.tree.map(lambda array: array.sharding, self._cache)
        self._compute = jax.jit(compute, out_shardings=(sharding.replicated, sharding.replicated, places))

    def restart(self) -> None:
        """Begin another text in the same pages and state."""
        self._length = 0

    def states(self) -> list[list[Array]]:
        """Return copies of the states after the text so far: the arrays of each state group."""
        return [[jnp.copy(array) for array in group.arrays] for group in self._cache if isinstance(group, StatePool)]

    def resume(self, length: int, states: list[list[Array]]) -> None:
        """Go back to the first `length` tokens, whose pages are in the cache, and to the states after them."""
        self._length, kept = length, iter(states)
        self._cache = tuple(
            StatePool(tuple(next(kept))) if isinstance(group, StatePool) else group for group in self._cache
        )

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Return the logits (8 or fewer, V) of the last of these tokens, which follow those of earlier calls."""
        arguments = jnp.asarray(tokens, jnp.int32), jnp.int32(self._length)
        with jax.sharding.use_abstract_mesh(self._mesh):
            logits, experts, self._cache = self._compute(self._params, self._cache, *arguments)
        if experts:
            self.experts.append(np.stack(experts))
        self._length += len(tokens)
        return np.asarray(logits)

    def greedy(self, logits: np.ndarray, count: int) -> list[int]:
        """Return `count` greedy tokens after the logits (V) of the last token so far."""
        tokens = [int(logits.argmax())]
        while len(tokens) < count:
            tokens.append(int(self.logits(np.array(tokens[-1:]))[-1].argmax()))
        return tokens
