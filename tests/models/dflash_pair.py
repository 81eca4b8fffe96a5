"""A tiny model and a DFlash drafter of it without an engine, with one row of pages each."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxserve.config import Config, ModelConfig, SchedulerConfig
from jaxserve.layers.attention import StepContext
from jaxserve.layers.cache import Cache
from jaxserve.models.registry import decoder_of, open_model, read_drafter
from jaxserve.models.skeleton import make_dflash_skeleton, make_skeleton
from jaxserve.runner.backend import chip_of
from jaxserve.runner.limits import make_policy
from jaxserve.runner.speculation.model import with_drafter
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape
from jaxserve.weights.loader import load_params
from tests.models.dflash_drafter import MASK, NumpyDFlash
from tests.models.one_row import PAGE_SIZE, new_cache, step_context

NUM_PAGES = 6


class DFlashPair:
    """The model at `target` and the drafter at `path`."""

    def __init__(self, target: Path, path: Path) -> None:
        config = Config(model=ModelConfig(model=str(target), dtype="float32"), scheduler=SchedulerConfig())
        checkpoint, (draft, own_checkpoint) = open_model(target), read_drafter(path)
        decoder, chip = with_drafter(config, decoder_of(checkpoint), draft), chip_of(jax.devices()[0])
        skeleton = make_skeleton(decoder, make_policy(config, decoder, chip))
        own = make_dflash_skeleton(draft, make_policy(config, draft, chip))
        sharding = make_sharding(decoder, MeshShape())
        model = skeleton.build(load_params(checkpoint, skeleton, sharding, lambda *_: None))
        drafter = own.build(load_params(own_checkpoint, own, sharding, lambda *_: None))
        caches = [new_cache(each, NUM_PAGES, jnp.dtype("float32"), jnp.dtype("float32")) for each in (decoder, draft)]

        def run(tokens: Array) -> Array:
            made = model.forward(tokens, caches[0], step_context(decoder, NUM_PAGES, jnp.int32(0), len(tokens)))
            assert made.tapped is not None, "a model with tapped layers"
            return made.tapped

        def store(tapped: Array, cache: Cache, first: Array) -> Cache:
            return drafter.store(tapped, cache, step_context(draft, NUM_PAGES, first, len(tapped)))

        def block(tokens: Array, cache: Cache, first: Array) -> tuple[Array, Cache]:
            step = _sees_all(step_context(draft, NUM_PAGES, first, len(tokens)), first + len(tokens))
            made, cache = drafter(drafter.embed(model, tokens), cache, step)
            return drafter.logits(model, made, jnp.int32(len(made))), cache

        self._mesh, self._cache = sharding.mesh.abstract_mesh, caches[1]
        self._run, self._store, self._block = jax.jit(run), jax.jit(store), jax.jit(block)
        self._embed = jax.jit(lambda tokens: drafter.embed(model, tokens))
        table = model.model.embed_tokens if model.lm_head is None else model.lm_head
        self.head = np.asarray(table(jnp.arange(decoder.vocab_size)), np.float64)
        """The model's output head, (V, D)."""

    def run(self, tokens: np.ndarray) -> np.ndarray:
        """Return the inputs of the tapped layers for a text."""
        with jax.sharding.use_abstract_mesh(self._mesh):
            return np.asarray(self._run(jnp.asarray(tokens, jnp.int32)), np.float64)

    def store(self, tapped: np.ndarray, first: int) -> None:
        """Fill the places of tokens from position `first` on."""
        with jax.sharding.use_abstract_mesh(self._mesh):
            self._cache = self._store(jnp.asarray(tapped, jnp.float32), self._cache, jnp.int32(first))

    def block(self, tokens: np.ndarray, first: int) -> np.ndarray:
        """Return logits of a block that begins at position `first`."""
        assert first + len(tokens) <= NUM_PAGES * PAGE_SIZE
        with jax.sharding.use_abstract_mesh(self._mesh):
            logits, self._cache = self._block(jnp.asarray(tokens, jnp.int32), self._cache, jnp.int32(first))
        return np.asarray(logits)

    def numpy_logits(self, drafter: NumpyDFlash, known: np.ndarray, num_drafts: int) -> np.ndarray:
        """Return logits (N, V) of the tokens after a text, by the drafter in NumPy."""
        tokens = np.array([known[-1], *[MASK] * num_drafts])
        with jax.sharding.use_abstract_mesh(self._mesh):
            embeddings = np.asarray(self._embed(jnp.asarray(tokens, jnp.int32)), np.float64)
        return drafter.logits(drafter(self.run(known[:-1]), embeddings)[1:], self.head)


def _sees_all(step: StepContext, end: Array) -> StepContext:
    """Return the step with tokens that see all keys before `end` in layers that are not causal."""
    (paging,) = step.groups
    ends = jnp.broadcast_to(end, paging.pages.shape)  # type: ignore[union-attr]
    groups = (paging._replace(key_ends=ends),)  # type: ignore[call-arg]
    return step._replace(groups=groups, causal_ragged=paging.ragged)  # type: ignore[union-attr, arg-type]
