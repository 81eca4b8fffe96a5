"""Alternating updates (AltUp, arXiv 2301.13310): A residual streams, of which a layer computes one (Gemma 3n).

A layer predicts each stream as a mixture of all, computes the active one, and corrects every prediction by a share of
what it found. Mixtures and shares depend on the token: a router makes them of the active stream.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxserve_kernels.backend import NATIVE
from jaxtyping import Array, Float

from jaxserve.layers.linear import Linear, Tokens
from jaxserve.layers.norm import make_norm, means
from jaxserve.layers.param import parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.layers.routing import sums
from jaxserve.model_config.altup import AltUpConfig
from jaxserve.model_config.decoder import DecoderConfig

_LEAST_SQUARE = 1e-5
"""Least mean square that a projected stream is divided by."""


class AltUpStreams(nnx.Module):
    """Make the streams from the embeddings, and one output of the streams.

    Every projected stream is scaled to the root mean square of the first.
    """

    def __init__(self, config: DecoderConfig, altup: AltUpConfig, policy: DtypePolicy) -> None:
        def projections() -> nnx.List[Linear]:
            d = config.hidden_size
            return nnx.List([Linear(d, d, (None, "embed"), policy) for _ in range(altup.num_streams - 1)])

        self.projections, self.unembed_projections = projections(), projections()
        self.is_alike = policy.backend in NATIVE

    def split(self, x: Float[Array, "T D"], tokens: Tokens) -> Float[Array, "A T D"]:
        """Return the streams of embeddings."""
        with jax.named_scope("altup"):
            return jnp.stack([x, *(self._scaled(project(x, tokens), x) for project in self.projections)])

    def join(self, streams: Float[Array, "A T D"], tokens: Tokens) -> Float[Array, "T D"]:
        """Return the mean of the first stream and projections of the others."""
        first, *others = streams
        with jax.named_scope("altup"):
            pairs = zip(self.unembed_projections, others, strict=True)
            made = [first, *(self._scaled(project(x, tokens), first) for project, x in pairs)]
            return sums(jnp.stack(made), 0, is_alike=self.is_alike)[0] / len(made)

    def _scaled(self, x: Float[Array, "T D"], like: Float[Array, "T D"]) -> Float[Array, "T D"]:
        own, wanted = (means(jnp.square(each.astype(jnp.float32)), is_alike=self.is_alike) for each in (x, like))
        return (x * jnp.sqrt(wanted / jnp.maximum(own, _LEAST_SQUARE))).astype(x.dtype)


class AltUp(nnx.Module):
    """Predictions and corrections of one layer."""

    def __init__(self, config: DecoderConfig, altup: AltUpConfig, policy: DtypePolicy) -> None:
        count, d, plain = altup.num_streams, config.hidden_size, policy.unquantized
        self.modality_router = Linear(count, d, (None, "embed"), plain)
        self.router_norm = make_norm(config, policy)
        self.prediction_coefs = Linear(count * count, count, (None, None), plain)
        self.correction_coefs = Linear(count, count, (None, None), plain)
        self.correct_output_scale = parameter((d,), (None,), policy.vectors) if altup.scales_active else None
        self.count, self.active, self.input_scale = count, altup.active, 1 / d
        self.is_alike = policy.backend in NATIVE

    def predict(self, streams: Float[Array, "A T D"], tokens: Tokens) -> Float[Array, "A T D"]:
        """Return every stream with a mixture of all streams added."""
        with jax.named_scope("altup"):
            routed = self._routed(streams[self.active], tokens)
            coefs = self.prediction_coefs.multiply(routed, tokens.num_real).reshape(-1, self.count, self.count)
            mixed = mixtures(streams, coefs, is_alike=self.is_alike)
            return streams + mixed.astype(streams.dtype)

    def correct(
        self, predictions: Float[Array, "A T D"], found: Float[Array, "T D"], tokens: Tokens
    ) -> Float[Array, "A T D"]:
        """Return the predictions with shares of the active one's error added. found: what the layer made of it."""
        with jax.named_scope("altup"):
            routed = self._routed(found, tokens)
            shares = self.correction_coefs.multiply(routed, tokens.num_real).T[..., None] + 1  # (A, T, 1)
            added = (found - predictions[self.active]).astype(jnp.float32) * shares
            return predictions + added.astype(predictions.dtype)

    def active_output(self, streams: Float[Array, "A T D"]) -> Float[Array, "T D"]:
        """Return the active stream for the per-layer embeddings to gate."""
        x = streams[self.active]
        return x if self.correct_output_scale is None else x * self.correct_output_scale[...]

    def add(self, streams: Float[Array, "A T D"], x: Float[Array, "T D"]) -> Float[Array, "A T D"]:
        """Return the streams with x added to all but the first."""
        return jnp.concatenate([streams[:1], streams[1:] + x])

    def _routed(self, x: Float[Array, "T D"], tokens: Tokens) -> Float[Array, "T A"]:
        normed = self.router_norm(x) * self.input_scale
        return jnp.tanh(self.modality_router.multiply(normed, tokens.num_real)).astype(x.dtype)


def mixtures(streams: Float[Array, "A T D"], coefs: Float[Array, "T A A"], *, is_alike: bool) -> Float[Array, "A T D"]:
    """Return each token's sums of its streams, times one row of its coefficients for each sum. is_alike: see `sums`."""
    return sums(coefs.transpose(1, 2, 0)[..., None] * streams, 1, is_alike=is_alike)[:, 0]


class Laurel(nnx.Module):
    """A learned augmented residual layer of low rank (LAuReL, arXiv 2411.07501): x + norm(right(left(x)))."""

    def __init__(self, config: DecoderConfig, rank: int, policy: DtypePolicy) -> None:
        self.linear_left = Linear(rank, config.hidden_size, (None, "embed"), policy)
        self.linear_right = Linear(config.hidden_size, rank, ("embed", None), policy)
        self.post_laurel_norm = make_norm(config, policy)

    def __call__(self, x: Float[Array, "T D"], tokens: Tokens) -> Float[Array, "T D"]:
        with jax.named_scope("laurel"):
            made: Array = x + self.post_laurel_norm(self.linear_right(self.linear_left(x, tokens), tokens))
            return made
