"""A draft model within one traced step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.layers.cache import Cache
from jaxserve.models.skeleton import ModelSkeleton
from jaxserve.runner.context import step_context
from jaxserve.runner.inputs import Computed, Program
from jaxserve.runner.speculation.rows import Fields, Verified, pass_fields, sample_rows, text_fields, unrolled_on_gpus
from jaxserve.types import NO_LOGPROBS, ProgramKind


@dataclass(frozen=True)
class ModelDrafter:
    """Implements `drafter.Drafter` with a smaller model of the same tokens, which takes tokens of images for text."""

    skeleton: ModelSkeleton
    num_drafts: int
    params: tuple[Array, ...]
    program: Program

    def fill(self, computed: Computed, cache: Cache) -> Cache:
        """Compute the tokens of a mixed step, for their keys and values alone."""
        return self._hidden(computed.tokens, cache, computed.field, self.program)[1]

    def draft(self, verified: Verified, cache: Cache) -> tuple[Int[Array, "B N"], Cache]:
        """Return the tokens that the model chooses after each row's newest one.

        It computes the newest two tokens first: if the whole draft was right, it has not seen the one before the newest.
        """
        field, accepted, vocab_size = verified.field, verified.accepted, verified.skeleton.config.vocab_size

        def choose(tokens: Int[Array, "B C"], cache: Cache, first: Int[Array, "B"]) -> tuple[Int[Array, "B"], Cache]:
            """Compute C tokens of each row, which begin at position `first`, and choose the next one."""
            size, count = tokens.shape
            fits = verified.chunk.is_live & (first + count <= verified.capacity)
            kind: ProgramKind = "decode" if count == 1 else "mixed"
            program = replace(self.program, kind=kind, num_tokens=count * size)
            hidden, cache = self._hidden(tokens.reshape(-1), cache, pass_fields(field, first, fits, count), program)
            logits = self._logits(hidden[count - 1 :: count], field["query_starts"][-1], vocab_size)
            by_row = field["sampling"], field["slots"], first + count
            chosen = sample_rows(verified.skeleton, logits, verified.slots, by_row, jnp.int32(NO_LOGPROBS))
            return chosen.token_ids, cache

        def go_on(index: Array | int, carry: tuple[Int[Array, "B N"], Cache]) -> tuple[Int[Array, "B N"], Cache]:
            drafts, cache = carry
            last = jax.lax.dynamic_slice_in_dim(drafts, index - 1, 1, 1)
            token, cache = choose(last, cache, accepted.position + index)
            return jax.lax.dynamic_update_slice_in_dim(drafts, token[:, None], index, 1), cache

        pair = jnp.stack([accepted.before, accepted.newest], 1)
        token, cache = choose(pair, cache, accepted.position - 1)
        drafts = jnp.zeros((len(token), self.num_drafts), jnp.int32).at[:, 0].set(token)
        return unrolled_on_gpus(1, self.num_drafts, go_on, (drafts, cache))

    def _hidden(
        self, tokens: Int[Array, "T"], cache: Cache, field: Fields, program: Program
    ) -> tuple[Float[Array, "T D"], Cache]:
        """Return the head's input of each token, and the cache (DONATED)."""
        tokens = jnp.minimum(tokens, self.skeleton.config.vocab_size - 1)
        step = step_context(self.skeleton, text_fields(field), cache, replace(program, images=None))
        return self.skeleton.build(self.params).hidden(tokens, cache, step)

    def _logits(self, hidden: Float[Array, "B D"], num_rows: Int[Array, ""], vocab_size: int) -> Float[Array, "B V"]:
        """Return logits for the vocabulary of the model that verifies: checkpoints pad theirs differently."""
        logits = self.skeleton.build(self.params).logits(hidden, num_rows)[:, :vocab_size]
        return jnp.pad(logits, ((0, 0), (0, vocab_size - logits.shape[1])), constant_values=-jnp.inf)
