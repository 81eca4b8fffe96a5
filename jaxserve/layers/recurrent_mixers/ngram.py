"""Embeddings of several tokens in a row, gated and convolved (Qwen4-Exp)."""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxserve_kernels.segments import Segments
from jaxtyping import Array, Float, Int, UInt32

from jaxserve.layers.attention import StepContext
from jaxserve.layers.cache import Cache
from jaxserve.layers.linear import Embedding, Linear, Tokens
from jaxserve.layers.mixers import mix
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.policy import DtypePolicy
from jaxserve.layers.recurrent import DepthwiseConv, Parameters, RecurrentState, convolve
from jaxserve.model_config.cache import LayerPlaces
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.recurrent import NgramConfig

_LEAST_GATE: Final = 1e-6
"""Least distance from 0 of what the root of a gate is taken of."""
_HALF: Final = 0xFFFF


class NgramEmbeddings(nnx.Module):
    """Add to each stream a projection of the token's embeddings, gated by how well another one agrees with the stream, and a convolution of
    what was added to the last tokens."""

    def __init__(self, config: DecoderConfig, ngram: NgramConfig, policy: DtypePolicy) -> None:
        dim, count = config.hidden_size, ngram.num_channels // config.hidden_size
        self.table = Embedding(ngram.num_rows, ngram.dim // len(ngram.sizes), policy)
        self.key_proj = Linear(count * dim, ngram.dim, (None, None), policy)
        self.value_proj = Linear(dim, ngram.dim, (None, None), policy)
        self.norm_key, self.norm_query, self.norm_conv = (
            RMSNorm(dim, config.norm_eps, policy, config.norm_weights, num_groups=count) for _ in range(3)
        )
        self.last_tokens = LastTokens(ngram, policy)
        self.last_inputs = DilatedConv(ngram, policy)
        self.ngram, self.shape = ngram, (-1, count, dim)

    def __call__(
        self, streams: Float[Array, "A T D"], cache: Cache, places: LayerPlaces, step: StepContext
    ) -> tuple[Float[Array, "A T D"], Cache]:
        """Return the streams with embeddings added, and the cache with the last tokens and inputs of the convolution."""
        assert step.token_ids is not None, "embeddings are those of tokens"
        assert places.last_tokens is not None and places.last_inputs is not None, (
            "embeddings of several tokens have states"
        )
        with jax.named_scope("ngram"):
            before, cache = mix(self.last_tokens, step.token_ids, cache, places.last_tokens, step)
            rows = ngram_rows(self.ngram, step.token_ids, before.astype(jnp.int32))
            found = self.table(rows.reshape(-1)).reshape(len(rows), -1)
            keys = self.norm_key(self.key_proj(found, step.tokens).reshape(self.shape))
            queries = self.norm_query(jnp.moveaxis(streams, 0, 1))  # (T, A, D)
            agreement = (keys.astype(jnp.float32) * queries.astype(jnp.float32)).sum(-1, keepdims=True)
            agreement = agreement * self.shape[-1] ** -0.5
            gate = jnp.sign(agreement) * jnp.sqrt(jnp.maximum(jnp.abs(agreement), _LEAST_GATE))
            values = self.value_proj(found, step.tokens)[:, None].astype(jnp.float32)
            gated = (jax.nn.sigmoid(gate) * values).astype(streams.dtype)
            inputs = self.norm_conv(gated).reshape(len(rows), -1)
            mixed, cache = mix(self.last_inputs, inputs, cache, places.last_inputs, step)
            added = gated + mixed.reshape(gated.shape)
            return streams + jnp.moveaxis(added, 1, 0), cache


class LastTokens(nnx.Module):
    """The tokens before each token, as a convolution whose taps each pick one: a recurrent mixer without parameters.

    Tokens are stored plus 1, so that the zeros before a text are no token, in float32, which has all integers up to 2^24.
    """

    def __init__(self, ngram: NgramConfig, policy: DtypePolicy) -> None:
        self.num_kept = ngram.num_tokens - 1
        self.rules = policy.rules
        self.head_axis: str | None = None
        self.backend = policy.backend
        self.takes_tokens_in_turn = True

    def project(self, x: Int[Array, "T"], tokens: Tokens) -> tuple[tuple[Float[Array, "T K"]], None]:
        """Return a column for each distance, all alike."""
        stored = (x + 1).astype(jnp.float32)
        return (jnp.broadcast_to(stored[:, None], (len(x), self.num_kept)),), None

    @property
    def parameters(self) -> Parameters:
        """Return nothing: the taps are constants."""
        return ()

    def recur(
        self, parameters: Parameters, inputs: tuple[Float[Array, "T K"], ...], state: RecurrentState, segments: Segments
    ) -> tuple[Float[Array, "T K"], RecurrentState]:
        """Return the tokens before each one plus 1, the latest first, and the last tokens of each row."""
        kept = self.num_kept
        taps = np.zeros((kept, 1, kept + 1), np.float32)
        taps[np.arange(kept), 0, kept - 1 - np.arange(kept)] = 1
        (stored,) = inputs
        (found,), windows = convolve(
            jnp.asarray(taps), None, stored, state.windows, segments, self.backend, is_silu=False
        )
        return found, RecurrentState(windows)

    def finish(self, made: Float[Array, "T K"], rest: None, tokens: Tokens) -> Float[Array, "T K"]:
        """Return the tokens before each one, as `recur` returns them."""
        return made


class DilatedConv(nnx.Module):
    """A convolution of each channel over every n-th of the last tokens, with SiLU: a recurrent mixer."""

    def __init__(self, ngram: NgramConfig, policy: DtypePolicy) -> None:
        self.conv1d = DepthwiseConv(ngram.num_channels, ngram.num_taps, policy, bias=False)
        self.distance = ngram.num_tokens
        self.rules = policy.rules
        self.head_axis: str | None = None
        self.backend = policy.backend
        self.takes_tokens_in_turn = True

    def project(self, x: Float[Array, "T C"], tokens: Tokens) -> tuple[tuple[Float[Array, "T C"]], None]:
        """Return the inputs."""
        return (x,), None

    @property
    def parameters(self) -> Parameters:
        """The taps, with zeros for the tokens between those that the convolution sees."""
        taps, distance = self.conv1d.weight[...], self.distance
        shape = (*taps.shape[:2], (taps.shape[2] - 1) * distance + 1)
        return (jnp.zeros(shape, taps.dtype).at[:, :, ::distance].set(taps),)

    def recur(
        self, parameters: Parameters, inputs: tuple[Float[Array, "T C"], ...], state: RecurrentState, segments: Segments
    ) -> tuple[Float[Array, "T C"], RecurrentState]:
        """Return the convolution's sums after SiLU, and the last inputs of each row."""
        (taps,), (sources,) = parameters, inputs
        (mixed,), windows = convolve(taps, None, sources, state.windows, segments, self.backend)
        return mixed, RecurrentState(windows)

    def finish(self, made: Float[Array, "T C"], rest: None, tokens: Tokens) -> Float[Array, "T C"]:
        """Return what `recur` returns for each token."""
        return made


def ngram_rows(ngram: NgramConfig, token_ids: Int[Array, "T"], before: Int[Array, "T K"]) -> Int[Array, "T J"]:
    """Return the rows of the table that the heads of each token look up.

    before: the tokens before each one plus 1, the latest first; 0: there is none.

    The row of a head is a remainder of the exclusive or of products below 2^63. Devices have integers of 32 bits: a product is two of
    them, and a remainder is taken of a few bits at a time.
    """
    end, found = ngram.end_token, token_ids
    high, low = _multiplied(token_ids, ngram.multipliers[0])
    rows, starts = [], np.cumsum((0, *ngram.sizes))
    for distance, factor in enumerate(ngram.multipliers[1:]):
        # What stands before an end token, or before the text, is an end token.
        own = jnp.where(before[:, distance] > 0, before[:, distance] - 1, end)
        found = own if distance == 0 else jnp.where(found == end, end, own)
        more_high, more_low = _multiplied(found, factor)
        high, low = high ^ more_high, low ^ more_low
        first = distance * ngram.heads_per_length
        heads = slice(first, first + ngram.heads_per_length)
        rest = _remainder(high[:, None], low[:, None], np.array(ngram.sizes[heads], np.uint32))
        rows.append(rest.astype(jnp.int32) + starts[:-1][heads].astype(np.int32))
    return jnp.concatenate(rows, -1)


def _multiplied(tokens: Int[Array, "T"], factor: int) -> tuple[UInt32[Array, "T"], UInt32[Array, "T"]]:
    """Return the two halves of tokens times a factor, which are below 2^63."""
    tokens = tokens.astype(jnp.uint32)
    upper, lower = tokens >> 16, tokens & _HALF
    high = tokens * np.uint32(factor >> 32)
    first, second = np.uint32(factor & _HALF), np.uint32(factor >> 16 & _HALF)
    least, cross, other = lower * first, lower * second, upper * first
    middle = (least >> 16) + (cross & _HALF) + (other & _HALF)
    high = high + upper * second + (cross >> 16) + (other >> 16) + (middle >> 16)
    return high, (middle << 16) | (least & _HALF)


def _remainder(high: UInt32[Array, "T 1"], low: UInt32[Array, "T 1"], sizes: np.ndarray) -> UInt32[Array, "T J"]:
    """Return (high * 2^32 + low) modulo sizes below 2^31."""
    num_bits = 32 - int(sizes.max()).bit_length()
    rest, left = high % sizes, 32
    while left:
        count = min(num_bits, left)
        left -= count
        bits = (low >> np.uint32(left)) & np.uint32((1 << count) - 1)
        rest = ((rest << np.uint32(count)) | bits) % sizes
    return rest
