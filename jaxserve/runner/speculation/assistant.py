"""A drafter of Gemma 4 within one traced step.

It stores nothing: its layers attend to the keys and values that the model has stored of the tokens before a row's newest one, which the
same step has verified. So chunks, prefix hits and preemption leave it nothing to make up for, and mixed and decode steps do
nothing for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.layers.attention import StepContext
from jaxserve.layers.cache import Cache
from jaxserve.layers.rope import rotation, sliding_rotation
from jaxserve.models.decoder import Decoder
from jaxserve.models.skeleton import AssistantSkeleton
from jaxserve.runner.context import step_context
from jaxserve.runner.inputs import Computed, Program
from jaxserve.runner.speculation.rows import Verified, pass_fields, sample_rows, text_fields, unrolled_on_gpus
from jaxserve.types import NO_LOGPROBS

_Drafts = tuple[Int[Array, "B N"], Int[Array, "B"], Float[Array, "B E"], Cache]
"""Drafted tokens, the newest of them, the hidden state for the next one, and the model's cache."""


@dataclass(frozen=True)
class AssistantDrafter:
    """Implements `drafter.Drafter` without cache groups of its own: the cache that it drafts with is the model's."""

    skeleton: AssistantSkeleton
    num_drafts: int
    params: tuple[Array, ...]
    model: Decoder
    program: Program

    def fill(self, computed: Computed, cache: Cache) -> Cache:
        """Return the cache as it is."""
        return cache

    def draft(self, verified: Verified, cache: Cache) -> tuple[Int[Array, "B N"], Cache]:
        """Return the tokens that the drafter chooses after each row's newest one, and the model's cache (DONATED)."""
        field, accepted, assistant = verified.field, verified.accepted, self.skeleton.build(self.params)
        last = jnp.take_along_axis(verified.chunk.places, accepted.counts[:, None] - 1, 1)[:, 0]
        step = self._context(verified, cache)

        def go_on(index: Array | int, carry: _Drafts) -> _Drafts:
            drafts, token, hidden, cache = carry
            made, hidden, cache = assistant(self.model.embed(token), hidden, cache, step)
            logits = assistant.logits(made, field["query_starts"][-1])
            by_row = field["sampling"], field["slots"], accepted.position + index + 1
            chosen = sample_rows(verified.skeleton, logits, verified.slots, by_row, jnp.int32(NO_LOGPROBS))
            token = chosen.token_ids
            return jax.lax.dynamic_update_slice_in_dim(drafts, token[:, None], index, 1), token, hidden, cache

        empty = jnp.zeros((len(last), self.num_drafts), jnp.int32)
        start = empty, accepted.newest, verified.hidden[last], cache
        drafts, _, _, cache = unrolled_on_gpus(0, self.num_drafts, go_on, start)
        return drafts, cache

    def _context(self, verified: Verified, cache: Cache) -> StepContext:
        """Return what the layers get: the position of each row's newest token, and the keys of the tokens before it."""
        position, is_live, config = verified.accepted.position, verified.chunk.is_live, self.skeleton.config
        field = pass_fields(text_fields(verified.field), position, is_live)
        field |= {"kv_lengths": jnp.where(is_live, position, 0)}
        program = replace(self.program, kind="decode", num_tokens=len(position), images=None)
        positions = field["positions"]
        return step_context(verified.skeleton, field, cache, program)._replace(
            rotation=rotation(config, positions),
            sliding_rotation=sliding_rotation(config, positions),
            adapters=None,
            kv_scales=self.model.kv_scales(),
        )
