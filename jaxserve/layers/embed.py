"""Token embedding, which may double as the output head."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.layers.linear import project
from jaxserve.layers.param import parameter


class Embedding(nnx.Module):
    """A `[V, D]` table: looked up by id, or multiplied with to give logits."""

    def __init__(self, vocab_size: int, dim: int, dtype: jnp.dtype) -> None:
        self.weight = parameter((vocab_size, dim), ("vocab", "embed"), dtype)

    def __call__(self, token_ids: Int[Array, "T"]) -> Float[Array, "T D"]:
        return self.weight[...][token_ids]

    def logits(self, x: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Scores of every token, in float32 whatever the weights are."""
        return project(x, self.weight[...], out_dtype=jnp.dtype(jnp.float32))
