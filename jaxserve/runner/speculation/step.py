"""The steps of an engine with a draft model, a multi-token-prediction layer, an EAGLE-3 head, a DFlash drafter or a drafter of Gemma 4, or
with recurrent states and drafts by prompt lookup.

A speculative step is one program: the model computes each row's newest token and the tokens that were drafted for it, as
one chunk that reads the row's keys once; it samples after each of them, and accepts the samples up to and with the first
that differs from the draft; then the draft model drafts the tokens of the next step, which wait in the row's slot, beside
the position that the row has reached.

A sample depends on its logits, the request's seed and its position only. The draft model samples with the same seed and
position, so where the models agree both choose the same token; the result never depends on the draft (drafter-invariant
speculative decoding, arXiv 2408.07978). Text and distribution are those of single steps, and nothing is sampled again.
Tokens are drafted by a `drafter.Drafter`, or come with the plan (prompt lookup).

Recurrent states are read while the tokens are verified, and written when it is known how many of them are accepted: what
they depend on is kept for each token, and the recurrences are computed once more over the accepted ones.

Nothing that a draft consists of needs to be right: drafts that are stale, or made from keys that were never computed, are
wrong guesses. Mixed steps compute the drafter's keys for all of their tokens, decode steps do not.

Letters: B rows, N tokens that are drafted for a row, W = 1 + N tokens of a row, T = B * W, I numbers of a packed plan.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxserve.layers.cache import Cache, pages_shape, with_pending_states
from jaxserve.models.skeleton import AssistantSkeleton, DFlashSkeleton, EagleSkeleton, ModelSkeleton, PredictorSkeleton
from jaxserve.runner.context import step_context
from jaxserve.runner.inputs import OUTPUT_FIELDS, DraftModel, Outcome, Program, StepTask, pack_arrays
from jaxserve.runner.outputs.options import PLAIN_RESULTS, ResultOptions
from jaxserve.runner.outputs.routed_experts import stacked
from jaxserve.runner.slots import store_tokens, take_up
from jaxserve.runner.speculation.drafter import Drafter, make_drafter
from jaxserve.runner.speculation.predictor import PredictorDrafter
from jaxserve.runner.speculation.rows import Verified, accept, make_chunk, sample_rows
from jaxserve.runner.state import StateArrays
from jaxserve.runner.steps import read_plan, run_single_step, run_step
from jaxserve.scheduler.plan import UNREAD_TOKEN, StepPlan, StepResult


def speculative_task(
    task: StepTask[StepPlan, StepResult],
    draft: DraftModel | None,
    options: ResultOptions = PLAIN_RESULTS,
    num_planned: int = 0,
) -> StepTask[StepPlan, StepResult]:
    """Return `task` for an engine with this draft model, or for one whose plans bring up to `num_planned` drafted tokens of each row;
    `task` itself for any other."""
    if draft is None and not num_planned:
        return task
    if draft is None:
        name = f"{task.name}, {num_planned} drafted tokens of the plan"
        return replace(task, name=name, step=partial(_lookup_step, options=options))
    skeleton = draft.skeleton
    model = hashlib.sha256(repr((skeleton.config, skeleton.leaves, skeleton.policy)).encode()).hexdigest()[:16]
    kinds = {
        PredictorSkeleton: "MTP layer",
        EagleSkeleton: "EAGLE-3 head",
        DFlashSkeleton: "DFlash drafter",
        AssistantSkeleton: "drafter of Gemma 4",
    }
    drafter = kinds.get(type(skeleton), "model")
    name = f"{task.name}, {draft.num_drafts} tokens drafted by {drafter} {model}"
    step = partial(_step, draft=draft, options=options)
    return replace(task, name=name, step=step, draft_model=draft)


def _lookup_step(
    skeleton: ModelSkeleton,
    params: tuple[Array, ...],
    state: StateArrays,
    packed: Int[Array, "I"],
    program: Program,
    options: ResultOptions,
) -> tuple[StateArrays, tuple[Array, ...]]:
    """Run a step of any kind, in which drafted tokens are those of the plan (DONATES the state)."""
    if program.kind == "speculate":
        return _verify(skeleton, params, state, packed, program, options)[:2]
    return run_step(skeleton, params, state, packed, program, options)


def _step(
    skeleton: ModelSkeleton,
    params: tuple[Array, ...],
    state: StateArrays,
    packed: Int[Array, "I"],
    program: Program,
    draft: DraftModel,
    options: ResultOptions,
) -> tuple[StateArrays, tuple[Array, ...]]:
    """Run a step of any kind. `params` are those of the model, then of the draft model; so are the cache groups of `state`
    (DONATED)."""
    num_groups = len(skeleton.config.cache.groups)
    assert state.cache is not None, "a decoder"
    own, cache = state._replace(cache=state.cache[:num_groups]), state.cache[num_groups:]
    drafter, params = make_drafter(draft, skeleton, params, program)
    if program.kind == "speculate":
        return _speculate(skeleton, params, own, packed, program, drafter, cache, options)
    if program.kind == "mixed":
        reads_all = isinstance(drafter, PredictorDrafter)
        after, outputs, computed = run_single_step(skeleton, params, own, packed, program, options, reads_all=reads_all)
        with jax.named_scope("draft_model"):
            cache = drafter.fill(computed, cache)
    else:
        after, outputs = run_step(skeleton, params, own, packed, program, options)
    assert after.cache is not None, "a decoder"
    return after._replace(cache=(*after.cache, *cache), drafts=state.drafts), outputs


def _speculate(
    skeleton: ModelSkeleton,
    params: tuple[Array, ...],
    state: StateArrays,
    packed: Int[Array, "I"],
    program: Program,
    drafter: Drafter,
    draft_cache: Cache,
    options: ResultOptions,
) -> tuple[StateArrays, tuple[Array, ...]]:
    """Verify the drafts in the slots, and draft; returns the state (DONATED) and what `_verify` returns for the host.

    `state` has the model's cache, the result the draft model's as well.
    """
    after, outputs, verified = _verify(skeleton, params, state, packed, program, options)
    assert after.cache is not None and state.drafts is not None, "an engine with a draft model"
    with jax.named_scope("draft_model"):
        drafted, cache = drafter.draft(verified, draft_cache or after.cache)
    cache = (*after.cache, *cache) if draft_cache else cache
    waiting = jnp.concatenate([verified.accepted.position[:, None], drafted], 1)
    drafts = state.drafts.at[verified.field["slots"]].set(waiting)
    return after._replace(cache=cache, drafts=drafts), outputs


def _verify(
    skeleton: ModelSkeleton,
    params: tuple[Array, ...],
    state: StateArrays,
    packed: Int[Array, "I"],
    program: Program,
    options: ResultOptions,
) -> tuple[StateArrays, tuple[Array, ...], Verified]:
    """Verify the drafts in the slots, or those of the plan if the state has none; returns the state (DONATED), the packed result
    with the experts of each row's tokens with `has_experts`, and the results to draft from."""
    cache, slots, drafts = state.cache, state.slots, state.drafts
    assert cache is not None and slots is not None, "a decoder"
    vocab_size, width = skeleton.config.vocab_size, program.max_steps
    field, tables = read_plan(state, packed, program)
    newest, rows = take_up(slots, field, vocab_size)
    capacity = field["num_pages"] * pages_shape(cache)[3]
    if drafts is None:
        waiting = jnp.concatenate([field["positions"][:, None], field["drafted_tokens"]], 1)
    else:
        waiting = drafts[field["slots"]]
    chunk = make_chunk(field, waiting, newest, rows, capacity, width)
    model, wide = skeleton.build(params), replace(program, kind="mixed", num_tokens=program.num_rows * width)
    context = step_context(skeleton, chunk.field, cache, wide)
    hidden, cache, chosen, tapped, _ = model.forward(chunk.field["tokens"], with_pending_states(cache), context)
    with jax.named_scope("sample"):
        own = chunk.field["rows"]
        logits = model.logits(hidden, chunk.field["query_starts"][-1])
        by_token = field["sampling"][own], field["slots"][own], chunk.field["positions"] + 1
        sampled = sample_rows(skeleton, logits, slots, by_token, field["num_top_logprobs"], options.logprobs_mode)
    slots, sampled = jax.lax.optimization_barrier((slots, sampled))  # see `take_up`
    accepted = accept(sampled.token_ids, chunk, field, newest)
    with jax.named_scope("settle"):
        cache = model.settle(cache, context, accepted.counts)
    slots, _ = store_tokens(slots, field, rows._replace(kv_lengths=accepted.position), accepted.newest, vocab_size)
    is_shown = (jnp.arange(width) < accepted.counts[:, None]) & ~rows.is_over[:, None]  # (B, W)
    outcome = Outcome(
        jnp.int32(width),
        jnp.where(is_shown, sampled.token_ids[chunk.places], UNREAD_TOKEN).T,
        sampled.logprobs[chunk.places].T,
        *(each[chunk.places[:, 0]] for each in sampled[2:]),  # rows that want alternatives have one token
    )
    outputs: tuple[Array, ...] = (pack_arrays(outcome, OUTPUT_FIELDS),)
    if options.has_experts:
        outputs += (stacked(skeleton.config, chosen)[chunk.places.T],)
    verified = Verified(skeleton, field, chunk, hidden, tapped, sampled.token_ids, accepted, slots, capacity)
    return state._replace(cache=cache, slots=slots, tables=tables), outputs, verified
