"""The steps of an engine with a draft model.

A speculative step is one program: the model computes each row's newest token and the tokens that were drafted for it, as
one chunk that reads the row's keys once; it samples after each of them, and accepts the samples up to and with the first
that differs from the draft; then the draft model drafts the tokens of the next step, which wait in the row's slot, beside
the position that the row has reached.

A sample depends on its logits, the request's seed and its position only. The draft model samples with the same seed and
position, so where the models agree both choose the same token; the result never depends on the draft (drafter-invariant
speculative decoding, arXiv 2408.07978). Text and distribution are those of single steps, and nothing is sampled again.

Nothing that a draft consists of needs to be right: drafts that are stale, or made from keys that were never computed, are
wrong guesses. Mixed steps compute the keys of the draft model for all of their tokens, decode steps do not.

Letters: B rows, N tokens that are drafted for a row, W = 1 + N tokens of a row, T = B * W, D model, V vocabulary, X slots.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxserve.layers.cache import Cache, pages_shape
from jaxserve.models.skeleton import ModelSkeleton
from jaxserve.runner.context import step_context
from jaxserve.runner.inputs import OUTPUT_FIELDS, DraftModel, Outcome, Program, StepTask, pack_arrays
from jaxserve.runner.outputs.routed_experts import stacked
from jaxserve.runner.slots import Rows, SamplerState, store_tokens, take_up
from jaxserve.runner.state import StateArrays
from jaxserve.runner.steps import read_plan, run_step
from jaxserve.sampling.sampler import Sampled, sample
from jaxserve.scheduler.plan import UNREAD_TOKEN, StepPlan, StepResult
from jaxserve.sharding.shard_map import batch_sharded
from jaxserve.types import NO_LOGPROBS, LogprobsMode, ProgramKind

Fields = dict[str, Any]
"""The fields of a packed plan by name."""


def speculative_task(
    task: StepTask[StepPlan, StepResult],
    draft: DraftModel | None,
    logprobs_mode: LogprobsMode,
    *,
    returns_experts: bool = False,
) -> StepTask[StepPlan, StepResult]:
    """Return `task` for an engine with this draft model. returns_experts: as in `generation_task`."""
    if draft is None:
        return task
    skeleton = draft.skeleton
    model = hashlib.sha256(repr((skeleton.config, skeleton.leaves, skeleton.policy)).encode()).hexdigest()[:16]
    name = f"{task.name}, {draft.num_drafts} tokens drafted by model {model}"
    step = partial(_step, draft=draft, logprobs_mode=logprobs_mode, returns_experts=returns_experts)
    return replace(task, name=name, step=step, draft_model=draft)


def _step(
    skeleton: ModelSkeleton,
    params: tuple[Array, ...],
    state: StateArrays,
    packed: Int[Array, "I"],
    program: Program,
    *,
    draft: DraftModel,
    logprobs_mode: LogprobsMode,
    returns_experts: bool,
) -> tuple[StateArrays, tuple[Array, ...]]:
    """Run a step of any kind. `params` are those of the model, then of the draft model; so are the cache groups of `state`
    (DONATED)."""
    num_arrays, num_groups = len(skeleton.arrays), len(skeleton.config.cache.groups)
    assert state.cache is not None and state.slots is not None, "a decoder that samples"
    own, params_of_draft = state._replace(cache=state.cache[:num_groups]), params[num_arrays:]
    drafter, cache = _Drafter(draft, params_of_draft, program), state.cache[num_groups:]
    params = params[:num_arrays]
    if program.kind == "speculate":
        return _speculate(
            skeleton, params, own, packed, program, drafter, cache, logprobs_mode, returns_experts=returns_experts
        )
    if program.kind == "mixed":
        field, _ = read_plan(own, packed, program)
        tokens, rows = take_up(state.slots, field, skeleton.config.vocab_size)
        is_real = field["is_real"] * ~rows.is_over[field["rows"]]
        _, cache = drafter.hidden(tokens, cache, field | {"is_real": is_real, "kv_lengths": rows.kv_lengths}, program)
    after, outputs = run_step(skeleton, params, own, packed, program, logprobs_mode, returns_experts=returns_experts)
    assert after.cache is not None, "a decoder"
    return after._replace(cache=(*after.cache, *cache), drafts=state.drafts), outputs


def _speculate(
    skeleton: ModelSkeleton,
    params: tuple[Array, ...],
    state: StateArrays,
    packed: Int[Array, "I"],
    program: Program,
    drafter: _Drafter,
    draft_cache: Cache,
    logprobs_mode: LogprobsMode,
    *,
    returns_experts: bool,
) -> tuple[StateArrays, tuple[Array, ...]]:
    """Verify the drafts in the slots, and draft; returns the state (DONATED), the packed result, and the experts of each
    row's tokens if `returns_experts`.

    `state` has the model's cache, the result the draft model's as well.
    """
    cache, slots, drafts = state.cache, state.slots, state.drafts
    assert cache is not None and slots is not None and drafts is not None, "an engine with a draft model"
    vocab_size, width = skeleton.config.vocab_size, program.max_steps
    field, tables = read_plan(state, packed, program)
    newest, rows = take_up(slots, field, vocab_size)
    capacity = field["num_pages"] * pages_shape(cache)[3]
    chunk = _make_chunk(field, drafts[field["slots"]], newest, rows, capacity, width)
    model, wide = skeleton.build(params), replace(program, kind="mixed", num_tokens=program.num_rows * width)
    context = step_context(skeleton, chunk.field, cache, wide)
    hidden, cache, chosen = model.hidden_and_experts(chunk.field["tokens"], cache, context)
    with jax.named_scope("sample"):
        own = chunk.field["rows"]
        logits = model.logits(hidden, chunk.field["query_starts"][-1])
        by_token = field["sampling"][own], field["slots"][own], chunk.field["positions"] + 1
        sampled = _sample(skeleton, logits, slots, by_token, field["num_top_logprobs"], logprobs_mode)
    slots, sampled = jax.lax.optimization_barrier((slots, sampled))  # see `take_up`
    accepted = _accept(sampled.token_ids, chunk, field, newest)
    slots, _ = store_tokens(slots, field, rows._replace(kv_lengths=accepted.position), accepted.newest, vocab_size)
    is_shown = (jnp.arange(width) < accepted.counts[:, None]) & ~rows.is_over[:, None]  # (B, W)
    outcome = Outcome(
        jnp.int32(width),
        jnp.where(is_shown, sampled.token_ids[chunk.places], UNREAD_TOKEN).T,
        sampled.logprobs[chunk.places].T,
        *(each[chunk.places[:, 0]] for each in sampled[2:]),  # rows that want alternatives have one token
    )
    with jax.named_scope("draft_model"):
        drafted, draft_cache = drafter.draft(skeleton, slots, draft_cache, field, accepted, chunk.is_live, capacity)
    drafts = drafts.at[field["slots"]].set(jnp.concatenate([accepted.position[:, None], drafted], 1))
    after = StateArrays((*cache, *draft_cache), slots, tables, drafts=drafts)
    outputs: tuple[Array, ...] = (pack_arrays(outcome, OUTPUT_FIELDS),)
    if returns_experts:
        outputs += (stacked(skeleton.config, chosen)[chunk.places.T],)
    return after, outputs


class _Chunk(NamedTuple):
    """The tokens that a speculative step computes: the rows' newest tokens, each followed by its draft."""

    field: Fields
    """The fields of the plan for these T tokens; real ones come first."""
    first: Int[Array, "B"]
    """Position of the newest token."""
    lengths: Int[Array, "B"]
    """Drafted tokens."""
    drafted: Int[Array, "B N"]
    places: Int[Array, "B W"]
    """The row's tokens on the flat axis; after the last one that one again."""
    is_live: Bool[Array, "B"]
    """False for padding and for rows that are over."""


def _make_chunk(
    field: Fields,
    waiting: Int[Array, "B W"],
    newest: Int[Array, "B"],
    rows: Rows,
    capacity: Int[Array, "B"],
    width: int,
) -> _Chunk:
    """Lay out the tokens of a speculative step. waiting: position and draft in the rows' slots; capacity: tokens that a row
    has pages for."""
    first = jnp.where(field["is_position_unread"] > 0, waiting[:, 0], field["positions"])
    most = jnp.minimum(capacity, field["length_limits"] - 1) - first - 1
    is_row = field["query_starts"][1:] > field["query_starts"][:-1]
    is_live = is_row & ~rows.is_over
    lengths = jnp.where(is_live, jnp.maximum(jnp.minimum(field["draft_lengths"], most), 0), 0)
    counts = jnp.where(is_row, 1 + lengths, 0)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    flat = jnp.arange(len(counts) * width)
    row = jnp.searchsorted(starts[1:], flat, side="right", method="compare_all")  # see `ragged_layout`
    row = jnp.minimum(row, len(counts) - 1).astype(jnp.int32)
    is_padding = flat >= starts[-1]
    ahead = jnp.where(is_padding, 0, flat - starts[row])
    tokens = jnp.where(ahead == 0, newest[row], waiting[row, ahead])
    wide = {
        "num_decode_rows": jnp.cumprod(counts == 1, dtype=jnp.int32).sum(dtype=jnp.int32),
        "tokens": tokens,
        "positions": jnp.where(is_padding, 0, first[row] + ahead),
        "rows": row,
        "is_real": (~is_padding & is_live[row]).astype(jnp.int32),
        "query_starts": starts,
        "kv_lengths": jnp.where(is_live, first + counts, 0),
    }
    places = starts[:-1, None] + jnp.minimum(jnp.arange(width), lengths[:, None])
    places = jnp.minimum(places, len(flat) - 1)
    return _Chunk(field | wide, first, lengths, waiting[:, 1:], places, is_live)


class _Accepted(NamedTuple):
    """The rows of a speculative step after their samples were compared with the draft."""

    counts: Int[Array, "B"]
    """Accepted samples of each row, at least 1."""
    before: Int[Array, "B"]
    """The token before the newest one."""
    newest: Int[Array, "B"]
    """The last accepted sample."""
    position: Int[Array, "B"]
    """Its position."""


def _accept(sampled: Int[Array, "T"], chunk: _Chunk, field: Fields, newest: Int[Array, "B"]) -> _Accepted:
    """Accept samples up to and with the first that differs from the draft or ends its request."""
    ids = sampled[chunk.places]  # (B, W)
    num_drafts = ids.shape[1] - 1
    is_right = (jnp.arange(num_drafts) < chunk.lengths[:, None]) & (ids[:, :num_drafts] == chunk.drafted)
    is_stop = (ids[:, :, None] == field["stop_token_ids"][:, None]).any(-1)
    num_known = chunk.first[:, None] + jnp.arange(2, num_drafts + 3)  # with the sample
    is_end = is_stop | (num_known >= field["length_limits"][:, None])
    counts = 1 + jnp.cumprod(is_right & ~is_end[:, :num_drafts], axis=1, dtype=jnp.int32).sum(1, dtype=jnp.int32)
    known = jnp.concatenate([newest[:, None], ids], 1)

    def at(index: Int[Array, "B"]) -> Int[Array, "B"]:
        return jnp.take_along_axis(known, index[:, None], 1)[:, 0]

    return _Accepted(counts, at(counts - 1), at(counts), chunk.first + counts)


def _sample(
    skeleton: ModelSkeleton,
    logits: Array,
    slots: Int[Array, "X1 S"],
    by_row: tuple[Int[Array, "R C"], Int[Array, "R"], Int[Array, "R"]],
    num_top_logprobs: Int[Array, ""],
    mode: LogprobsMode = "raw_logprobs",
) -> Sampled:
    """Sample from `logits`. by_row: sampling options, slot and number of known tokens of each row."""
    vocab_size = logits.shape[1]

    def choose(logits: Array, columns: Array, which: Array, num_known: Array, *rest: Array) -> Sampled:
        slots, num_top = rest
        return sample(logits, columns, SamplerState(slots, which, vocab_size), num_known, num_top, mode)

    return batch_sharded(choose, logits, by_row, (slots, num_top_logprobs), skeleton.policy.rules)


@dataclass(frozen=True)
class _Drafter:
    """The draft model within one traced step."""

    model: DraftModel
    params: tuple[Array, ...]
    program: Program

    def draft(
        self,
        skeleton: ModelSkeleton,
        slots: Int[Array, "X1 S"],
        cache: Cache,
        field: Fields,
        accepted: _Accepted,
        is_live: Bool[Array, "B"],
        capacity: Int[Array, "B"],
    ) -> tuple[Int[Array, "B N"], Cache]:
        """Return the tokens that the draft model chooses after each row's newest one.

        It computes the newest two tokens first: if the whole draft was right, it has not seen the one before the newest.
        """
        num_rows, size = field["query_starts"][-1], len(is_live)

        def choose(tokens: Int[Array, "B C"], cache: Cache, first: Int[Array, "B"]) -> tuple[Int[Array, "B"], Cache]:
            """Compute C tokens of each row, which begin at position `first`, and choose the next one."""
            count = tokens.shape[1]
            fits = is_live & (first + count <= capacity)
            step = field | {
                "num_decode_rows": num_rows if count == 1 else jnp.int32(0),
                "positions": jnp.where(fits[:, None], first[:, None] + jnp.arange(count), 0).reshape(-1),
                "rows": jnp.repeat(jnp.arange(size, dtype=jnp.int32), count),
                "is_real": jnp.repeat(fits.astype(jnp.int32), count),
                "query_starts": count * jnp.minimum(jnp.arange(size + 1, dtype=jnp.int32), num_rows),
                "kv_lengths": jnp.where(fits, first + count, 0),
            }
            kind: ProgramKind = "decode" if count == 1 else "mixed"
            program = replace(self.program, kind=kind, num_tokens=count * size)
            hidden, cache = self.hidden(tokens.reshape(-1), cache, step, program)
            logits = self._logits(hidden[count - 1 :: count], num_rows, skeleton.config.vocab_size)
            by_row = field["sampling"], field["slots"], first + count
            return _sample(skeleton, logits, slots, by_row, jnp.int32(NO_LOGPROBS)).token_ids, cache

        def go_on(index: Array | int, carry: tuple[Int[Array, "B N"], Cache]) -> tuple[Int[Array, "B N"], Cache]:
            drafts, cache = carry
            last = jax.lax.dynamic_slice_in_dim(drafts, index - 1, 1, 1)
            token, cache = choose(last, cache, accepted.position + index)
            return jax.lax.dynamic_update_slice_in_dim(drafts, token[:, None], index, 1), cache

        pair = jnp.stack([accepted.before, accepted.newest], 1)
        token, cache = choose(pair, cache, accepted.position - 1)
        num_drafts = self.model.num_drafts
        drafts = jnp.zeros((size, num_drafts), jnp.int32).at[:, 0].set(token)
        if num_drafts == 1:
            return drafts, cache
        loop = partial(jax.lax.fori_loop, 1, num_drafts, go_on)
        # A loop would keep the step out of a CUDA graph.
        return jax.lax.platform_dependent(  # type: ignore[no-any-return]
            (drafts, cache), cuda=partial(loop, unroll=True), default=loop
        )

    def hidden(self, tokens: Int[Array, "T"], cache: Cache, field: Fields, program: Program) -> tuple[Array, Cache]:
        """Return the head's input of each token, and the cache (DONATED)."""
        skeleton = self.model.skeleton
        tokens = jnp.minimum(tokens, skeleton.config.vocab_size - 1)
        step = step_context(skeleton, field, cache, program)
        return skeleton.build(self.params).hidden(tokens, cache, step)

    def _logits(self, hidden: Array, num_rows: Int[Array, ""], vocab_size: int) -> Array:
        """Return logits for the vocabulary of the model that verifies: checkpoints pad theirs differently."""
        logits = self.model.skeleton.build(self.params).logits(hidden, num_rows)[:, :vocab_size]
        return jnp.pad(logits, ((0, 0), (0, vocab_size - logits.shape[1])), constant_values=-jnp.inf)
