"""The experts that every token of a step chose, as a further output of its program.

Letters: T tokens of the step, L layers with experts, k experts of a token, K decode steps of a call or tokens of a speculative
row, B rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt

from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.runner.inputs import Program, StepTask, unpack
from jaxserve.scheduler.plan import StepPlan, StepResult
from jaxserve.types import expert_dtype


def stacked(decoder: DecoderConfig, chosen: Sequence[Int[Array, "T k"]]) -> UInt[Array, "T L k"]:
    """Return the experts that tokens chose in each layer as one array. Traced. Those of padding tokens have no meaning."""
    assert decoder.experts is not None, "a model with experts"
    return jnp.stack(chosen, 1).astype(expert_dtype(decoder.experts.num_experts))


def no_experts(decoder: DecoderConfig, num_steps: int, num_tokens: int) -> UInt[Array, "K T L k"]:
    """Return the experts of a call before its first step. Traced."""
    experts = decoder.experts
    assert experts is not None, "a model with experts"
    shape = num_steps, num_tokens, decoder.num_expert_layers, experts.num_per_token
    return jnp.zeros(shape, expert_dtype(experts.num_experts))


def with_routed_experts(task: StepTask[StepPlan, StepResult]) -> StepTask[StepPlan, StepResult]:
    """Return `task` for programs whose second output is the experts of every token."""
    return replace(
        task,
        name=f"{task.name}, routed experts",
        unpack=unpack_routed,
        num_outputs=lambda plan: 2 if plan.targets is None else 3,
    )


def unpack_routed(plan: StepPlan, program: Program, outputs: Sequence[np.ndarray], device_seconds: float) -> StepResult:
    """Return what `unpack` returns, with the experts of the plan's tokens from the second output, `[K, T, L, k]`."""
    sampled, routed, *scores = outputs
    result = unpack(plan, program, (sampled, *scores), device_seconds)
    return replace(result, routed_experts=routed[: len(result.token_ids), : plan.num_tokens])
