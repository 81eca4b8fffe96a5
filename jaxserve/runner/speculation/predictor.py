"""The multi-token-prediction (MTP) layer of the model, or an EAGLE-3 head, within one traced step.

Both are one layer with a place in its cache for every token t that the model has computed: it is filled from the model's hidden states of t
and the token that follows t. Both are in the step that computes t: the token that follows is the next one of the prompt, or the
one that the step samples. So no hidden state is kept between steps, and a prompt in chunks has the entries that it would have if it
were computed at once. Two kinds of entries may differ, which changes drafts, not tokens: the last one of a page that another text
has filled, and the last one of a chunk that ends before a token of an image, whose embedding is not known yet.

In a speculative step the samples of a row follow its tokens, so one pass over the verified chunk fills the entries of all accepted
tokens, and its output after the last one predicts the first drafted token. Entries of drafts that were wrong, and those that
the layer makes of its own output for further tokens, are replaced when the model has computed their tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.layers.cache import Cache
from jaxserve.layers.linear import Tokens
from jaxserve.models.decoder import Decoder
from jaxserve.models.eagle import EagleHead
from jaxserve.models.predictor import MultiTokenPredictor
from jaxserve.models.skeleton import EagleSkeleton, PredictorSkeleton
from jaxserve.models.vision import ImageTokens
from jaxserve.runner.context import step_context
from jaxserve.runner.inputs import Computed, Program
from jaxserve.runner.speculation.rows import Fields, Verified, pass_fields, sample_rows, text_fields, unrolled_on_gpus
from jaxserve.scheduler.plan import NO_IMAGE_ROW
from jaxserve.types import NO_LOGPROBS

_Drafts = tuple[Int[Array, "B N"], Float[Array, "B D"], Cache]
"""Drafted tokens, the layer's output before the next one, and its cache."""


@dataclass(frozen=True)
class PredictorDrafter:
    """Implements `drafter.Drafter` with the MTP layer of the model itself, or with an EAGLE-3 head."""

    skeleton: PredictorSkeleton | EagleSkeleton
    num_drafts: int
    params: tuple[Array, ...]
    model: Decoder
    program: Program

    def fill(self, computed: Computed, cache: Cache) -> Cache:
        """Fill the entries of a mixed step's tokens. The last token of a row that samples nothing is followed by its target."""
        field, tokens = computed.field, computed.tokens
        rows, index = field["rows"], jnp.arange(len(tokens))
        after_row = jnp.where(field["is_sampling"][rows] > 0, computed.sampled.token_ids[rows], field["targets"])
        is_last = index + 1 == field["query_starts"][1:][rows]
        following = jnp.where(is_last, after_row, jnp.roll(tokens, -1))
        images = computed.images
        if images is not None:  # the plan has no row for the token after a chunk
            images = images._replace(rows=jnp.where(is_last, NO_IMAGE_ROW, jnp.roll(images.rows, -1)))
        start = self._start(computed.all_hidden(), computed.tapped, field)
        return self._predict(following, start, cache, field, self.program, images)[1]

    def draft(self, verified: Verified, cache: Cache) -> tuple[Int[Array, "B N"], Cache]:
        """Return the tokens that the layer predicts after each row's newest one."""
        field, accepted, chunk = verified.field, verified.accepted, verified.chunk
        wide = replace(self.program, kind="mixed", num_tokens=len(verified.sampled))
        start = self._start(verified.hidden, verified.tapped, chunk.field)
        made, cache = self._predict(verified.sampled, start, cache, chunk.field, wide)
        last = jnp.take_along_axis(chunk.places, accepted.counts[:, None] - 1, 1)[:, 0]
        single = replace(self.program, kind="decode", num_tokens=len(last))

        def choose(hidden: Float[Array, "B D"], index: Array | int) -> Int[Array, "B 1"]:
            """Choose drafted token number `index` of each row."""
            logits = self._layer.logits(self.model, hidden, field["query_starts"][-1])
            by_row = field["sampling"], field["slots"], accepted.position + index + 1
            chosen = sample_rows(verified.skeleton, logits, verified.slots, by_row, jnp.int32(NO_LOGPROBS))
            return chosen.token_ids[:, None]

        def go_on(index: Array | int, carry: _Drafts) -> _Drafts:
            drafts, hidden, cache = carry
            token = jax.lax.dynamic_slice_in_dim(drafts, index - 1, 1, 1)[:, 0]
            place = accepted.position + index - 1
            fits = chunk.is_live & (place < verified.capacity)
            hidden, cache = self._predict(token, hidden, cache, pass_fields(field, place, fits), single)
            return jax.lax.dynamic_update_slice_in_dim(drafts, choose(hidden, index), index, 1), hidden, cache

        hidden = made[last]
        drafts = jnp.zeros((len(last), self.num_drafts), jnp.int32).at[:, :1].set(choose(hidden, 0))
        drafts, _, cache = unrolled_on_gpus(1, self.num_drafts, go_on, (drafts, hidden, cache))
        return drafts, cache

    @property
    def _layer(self) -> MultiTokenPredictor | EagleHead:
        return self.skeleton.build(self.params)

    def _start(
        self, hidden: Float[Array, "T E"], tapped: Float[Array, "T KE"] | None, field: Fields
    ) -> Float[Array, "T D"]:
        """Return the hidden states that the layer begins with."""
        return self._layer.start(hidden, tapped, Tokens(field["query_starts"][-1]))

    def _predict(
        self,
        following: Int[Array, "T"],
        hidden: Float[Array, "T D"],
        cache: Cache,
        field: Fields,
        program: Program,
        images: ImageTokens | None = None,
    ) -> tuple[Float[Array, "T D"], Cache]:
        """Return the layer's output for tokens with these hidden states and following tokens, and its cache (DONATED).

        images: the embeddings that the model has for following tokens of images. An EAGLE-3 head takes them for text.
        """
        if isinstance(self.skeleton, EagleSkeleton):
            images, field, program = None, text_fields(field), replace(program, images=None)
        embeddings = self._layer.embed(self.model, jnp.maximum(following, 0))
        if images is not None:
            embeddings = images.replace(embeddings)
        step = step_context(self.skeleton, field, cache, program)
        return self._layer(embeddings, hidden, cache, step)
