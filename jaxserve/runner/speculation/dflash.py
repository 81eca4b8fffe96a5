"""A DFlash drafter within one traced step.

It has a place in its cache for every token that the model has computed, which it fills from the model's hidden states of that token alone.
So mixed steps fill the places of their tokens, whatever the chunks of a prompt are, and pages that are found in the prefix cache are right.

A speculative step fills the places of the tokens that it has verified, then computes one block for each row: the newest token and a mask
for each token to draft, whose keys and values lie at the positions after them. The next step replaces those: the positions of a block are
those of the tokens that it verifies. A block ends where a row has no more pages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.layers.cache import Cache
from jaxserve.models.decoder import Decoder
from jaxserve.models.dflash import DFlashDrafter
from jaxserve.models.skeleton import DFlashSkeleton
from jaxserve.runner.context import step_context
from jaxserve.runner.inputs import Computed, Program
from jaxserve.runner.speculation.rows import Fields, Verified, chunk_fields, sample_rows, text_fields
from jaxserve.types import NO_LOGPROBS


@dataclass(frozen=True)
class BlockDrafter:
    """Implements `drafter.Drafter` with a DFlash drafter, which takes tokens of images for text."""

    skeleton: DFlashSkeleton
    num_drafts: int
    params: tuple[Array, ...]
    model: Decoder
    program: Program

    def fill(self, computed: Computed, cache: Cache) -> Cache:
        """Fill the places of a mixed step's tokens."""
        return self._store(computed.tapped, cache, computed.field, self.program)

    def draft(self, verified: Verified, cache: Cache) -> tuple[Int[Array, "B N"], Cache]:
        """Return the tokens that the drafter predicts after each row's newest one."""
        field, accepted, dflash, width = verified.field, verified.accepted, self._drafter, 1 + self.num_drafts
        program = replace(self.program, kind="mixed", num_tokens=len(verified.sampled), images=None)
        cache = self._store(verified.tapped, cache, verified.chunk.field, program)
        room = verified.capacity - accepted.position
        is_row = field["query_starts"][1:] > field["query_starts"][:-1]
        counts = jnp.where(is_row, jnp.clip(room, 1, width), 0)
        is_live = verified.chunk.is_live & (room > 0)
        block, ahead, places = chunk_fields(text_fields(field), accepted.position, counts, is_live, width)
        rows = block["rows"]
        tokens = jnp.where(ahead == 0, accepted.newest[rows], dflash.dflash.mask_token_id)
        ends = jnp.maximum(block["kv_lengths"][rows], block["positions"] + 1)
        step = step_context(self.skeleton, block | {"key_ends": ends}, cache, program)
        made, cache = dflash(dflash.embed(self.model, tokens), cache, step)
        masks = made[places[:, 1:].reshape(-1)]  # (B N, D)
        logits = dflash.logits(self.model, masks, self.num_drafts * field["query_starts"][-1])
        num_known = accepted.position[:, None] + jnp.arange(1, width)  # (B, N)
        options, slots = (jnp.repeat(field[name], self.num_drafts, axis=0) for name in ("sampling", "slots"))
        by_row = options, slots, num_known.reshape(-1)
        chosen = sample_rows(verified.skeleton, logits, verified.slots, by_row, jnp.int32(NO_LOGPROBS))
        return chosen.token_ids.reshape(-1, self.num_drafts), cache

    @property
    def _drafter(self) -> DFlashDrafter:
        return self.skeleton.build(self.params)

    def _store(self, tapped: Float[Array, "T KD"] | None, cache: Cache, field: Fields, program: Program) -> Cache:
        """Return the cache (DONATED) with the keys and values of tokens with these hidden states."""
        assert tapped is not None, "a model with tapped layers"
        step = step_context(self.skeleton, text_fields(field), cache, replace(program, images=None))
        return self._drafter.store(tapped, cache, step)
