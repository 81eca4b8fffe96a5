"""A model as the running system sees it: a flat tuple of arrays, and how to put them back together.

flax ends here. `ModelSkeleton` is made without allocating anything; the loader fills its leaves by
name; the step functions rebuild the module while they are traced. Nothing of nnx crosses `jax.jit`:
a flat tuple of leaves costs a tenth of the dispatch time of module objects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.layers.numerics import Numerics
from jaxserve.models.config import DecoderConfig, EncoderConfig
from jaxserve.models.decoder import Decoder
from jaxserve.models.encoder import Encoder


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """One parameter: its checkpoint name, and what must be there."""

    name: str
    shape: tuple[int, ...]
    dtype: jnp.dtype
    axes: tuple[str | None, ...]


@dataclass(frozen=True)
class ModelSkeleton:
    """Everything of a model but its numbers."""

    config: DecoderConfig
    numerics: Numerics
    leaves: tuple[LeafSpec, ...]
    graph: Any
    treedef: Any

    @property
    def dtype(self) -> jnp.dtype:
        """Of the weights, before any quantisation."""
        return self.numerics.weights

    def build(self, leaves: tuple[jax.Array, ...]) -> Decoder:
        """The module over these arrays, in the order of `self.leaves`. Called while tracing."""
        model: Decoder = nnx.merge(self.graph, jax.tree.unflatten(self.treedef, leaves))
        return model


@dataclass(frozen=True)
class EncoderSkeleton:
    """The same of an encoder."""

    config: EncoderConfig
    numerics: Numerics
    leaves: tuple[LeafSpec, ...]
    graph: Any
    treedef: Any

    def build(self, leaves: tuple[jax.Array, ...]) -> Encoder:
        """The module over these arrays, in the order of `self.leaves`. Called while tracing."""
        model: Encoder = nnx.merge(self.graph, jax.tree.unflatten(self.treedef, leaves))
        return model


def make_skeleton(config: DecoderConfig, numerics: Numerics) -> ModelSkeleton:
    """Declare the decoder of `config` with its parameters as `numerics` says."""
    return ModelSkeleton(config, numerics, *_declare(lambda: Decoder(config, numerics)))


def make_encoder_skeleton(config: EncoderConfig, numerics: Numerics) -> EncoderSkeleton:
    """Declare the encoder of `config` with its parameters as `numerics` says."""
    return EncoderSkeleton(config, numerics, *_declare(lambda: Encoder(config, numerics)))


def _declare(make: Callable[[], nnx.Module]) -> tuple[tuple[LeafSpec, ...], Any, Any]:
    """Leaves, graph and tree of a module, without allocating anything."""
    graph, state = nnx.split(nnx.eval_shape(make))
    leaves = tuple(
        LeafSpec(".".join(map(str, path)), variable.shape, jnp.dtype(variable.dtype), variable.get_metadata()["axes"])
        for path, variable in nnx.to_flat_state(state)
    )
    arrays, treedef = jax.tree.flatten(state)
    if [leaf.shape for leaf in arrays] != [leaf.shape for leaf in leaves]:
        raise RuntimeError("flax orders flat state and tree leaves differently: names would go to wrong arrays")
    return leaves, graph, treedef
