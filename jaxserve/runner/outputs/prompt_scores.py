"""Scores of prompt tokens, in mixed steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.models.skeleton import ModelSkeleton
from jaxserve.runner.inputs import Program
from jaxserve.sampling.sampler import Scored, score
from jaxserve.sharding.shard_map import batch_sharded
from jaxserve.types import MAX_TOP_LOGPROBS, NO_LOGPROBS

MAX_SCORE_BLOCKS = 8
"""Most blocks in which the targets of a step are scored; each has at least as many tokens as the step has rows. GPUs compile each."""


def score_prompts(
    skeleton: ModelSkeleton,
    params: tuple[Array, ...],
    all_hidden: Callable[[], Float[Array, "T D"]],
    field: dict[str, Any],
    program: Program,
) -> Scored:
    """Score each token's target, block by block: logits of all tokens would not fit.

    Computes nothing if no request asks for scores, not even the head's inputs of all tokens (`all_hidden`). Without a loop on GPUs: a loop would keep the step out of a CUDA
    graph, and the host waiting for its end, whether scores are computed or not.
    """
    num_tokens = program.num_tokens
    size = max(program.num_rows, -(-num_tokens // MAX_SCORE_BLOCKS))
    model = skeleton.build(params)

    def go_on(hidden: Float[Array, "T D"], block: Array | int, scored: Scored) -> Scored:
        start = jnp.minimum(block * size, num_tokens - size)  # the last one may overlap the one before
        # One after the other: straight-line code might begin with the logits of all.
        start, scored = jax.lax.optimization_barrier((start, scored))
        targets = jnp.maximum(jax.lax.dynamic_slice_in_dim(field["targets"], start, size), 0)
        logits = model.logits(jax.lax.dynamic_slice_in_dim(hidden, start, size), jnp.int32(size))
        wanted = (field["num_prompt_logprobs"],)
        parts = batch_sharded(score, logits, (targets,), wanted, skeleton.policy.rules)
        updated = (
            jax.lax.dynamic_update_slice_in_dim(whole, part, start, 0)
            for whole, part in zip(scored, parts, strict=True)
        )
        return Scored(*updated)

    nothing = Scored(
        jnp.zeros(num_tokens, jnp.float32),
        jnp.zeros(num_tokens, jnp.int32),
        jnp.zeros((num_tokens, MAX_TOP_LOGPROBS), jnp.int32),
        jnp.zeros((num_tokens, MAX_TOP_LOGPROBS), jnp.float32),
    )

    def scores() -> Scored:
        score_block = partial(go_on, all_hidden())

        def all_blocks() -> Scored:
            return reduce(lambda scored, block: score_block(block, scored), range(-(-num_tokens // size)), nothing)

        def real_blocks() -> Scored:
            return jax.lax.fori_loop(0, -(-field["is_real"].sum(dtype=jnp.int32) // size), score_block, nothing)  # type: ignore[no-any-return]

        return jax.lax.platform_dependent(cuda=all_blocks, default=real_blocks)  # type: ignore[no-any-return]

    with jax.named_scope("score"):
        return jax.lax.cond(field["num_prompt_logprobs"] > NO_LOGPROBS, scores, lambda: nothing)  # type: ignore[no-any-return]
