"""A tiny model and an EAGLE-3 head of it without an engine, with one row of pages each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxserve.config import Config, ModelConfig, SchedulerConfig
from jaxserve.layers.cache import Cache
from jaxserve.layers.linear import Tokens
from jaxserve.models.registry import decoder_of, open_model, read_drafter
from jaxserve.models.skeleton import make_eagle_skeleton, make_skeleton
from jaxserve.runner.backend import chip_of
from jaxserve.runner.limits import make_policy
from jaxserve.runner.speculation.model import with_tapped_layers
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape
from jaxserve.weights.loader import load_params
from tests.models.one_row import PAGE_SIZE, new_cache, step_context

NUM_PAGES = 5


class EaglePair:
    """The model at `target` and the head at `path`."""

    def __init__(self, target: Path, path: Path, layers: tuple[int, ...] | None = None) -> None:
        """layers: tapped layers; None: those of the head."""
        config = Config(model=ModelConfig(model=str(target), dtype="float32"), scheduler=SchedulerConfig())
        checkpoint, (head, head_checkpoint) = open_model(target), read_drafter(path)
        decoder = decoder_of(checkpoint)
        decoder = (
            with_tapped_layers(config, decoder, head) if layers is None else replace(decoder, tapped_layers=layers)
        )
        chip, self.decoder = chip_of(jax.devices()[0]), decoder
        skeletons = (
            make_skeleton(decoder, make_policy(config, decoder, chip)),
            make_eagle_skeleton(head, make_policy(config, head, chip)),
        )
        sharding = make_sharding(decoder, MeshShape())
        target_skeleton, head_skeleton = skeletons
        model = target_skeleton.build(load_params(checkpoint, target_skeleton, sharding, lambda *_: None))
        drafter = head_skeleton.build(load_params(head_checkpoint, head_skeleton, sharding, lambda *_: None))
        caches = [new_cache(each, NUM_PAGES, jnp.dtype("float32"), jnp.dtype("float32")) for each in (decoder, head)]

        def run(tokens: Array) -> tuple[Array, Array, Array]:
            step = step_context(decoder, NUM_PAGES, jnp.int32(0), len(tokens))
            made = model.forward(tokens, caches[0], step)
            assert made.tapped is not None, "a model with tapped layers"
            return made.hidden, made.tapped, model.model.norm(made.tapped[:, -decoder.hidden_size :])

        def start(tapped: Array) -> Array:
            return drafter.start(tapped, tapped, Tokens(jnp.int32(len(tapped))))

        def predict(following: Array, hidden: Array, cache: Cache, first: Array) -> tuple[Array, Array, Cache]:
            step = step_context(head, NUM_PAGES, first, len(following))
            made, cache = drafter(drafter.embed(model, following), hidden, cache, step)
            return drafter.logits(model, made, jnp.int32(len(made))), made, cache

        self._mesh, self._cache = sharding.mesh.abstract_mesh, caches[1]
        self._run, self._start, self._predict = jax.jit(run), jax.jit(start), jax.jit(predict)
        self._embed = jax.jit(lambda tokens: drafter.embed(model, tokens))

    def run(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the final hidden states of a text, the inputs of the tapped layers, and those of the last of them normalised."""
        with jax.sharding.use_abstract_mesh(self._mesh):
            hidden, tapped, normed = self._run(jnp.asarray(tokens, jnp.int32))
        return np.asarray(hidden), np.asarray(tapped), np.asarray(normed)

    def start(self, tapped: np.ndarray) -> np.ndarray:
        with jax.sharding.use_abstract_mesh(self._mesh):
            return np.asarray(self._start(jnp.asarray(tapped)))

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """Return the embeddings that the head reads."""
        with jax.sharding.use_abstract_mesh(self._mesh):
            return np.asarray(self._embed(jnp.asarray(tokens, jnp.int32)))

    def predict(self, following: np.ndarray, hidden: np.ndarray, first: int) -> tuple[np.ndarray, np.ndarray]:
        """Return logits and outputs for tokens from position `first` on, given those that follow them."""
        assert first + len(following) <= NUM_PAGES * PAGE_SIZE
        with jax.sharding.use_abstract_mesh(self._mesh):
            arguments = jnp.asarray(following, jnp.int32), jnp.asarray(hidden), self._cache, jnp.int32(first)
            logits, made, self._cache = self._predict(*arguments)
        return np.asarray(logits), np.asarray(made)
