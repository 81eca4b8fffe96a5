"""The task of an engine that generates, with what its settings say. Steps do not import it: they do not depend on settings."""

from __future__ import annotations

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.runner.buckets import resolve_limits
from jaxserve.runner.inputs import DraftModel, StepTask
from jaxserve.runner.limits import num_planned_drafts
from jaxserve.runner.outputs.options import ResultOptions
from jaxserve.runner.speculation.step import speculative_task
from jaxserve.runner.steps import generation_task
from jaxserve.scheduler.plan import StepPlan, StepResult


def engine_task(
    config: Config, model: DecoderConfig, platform: str, draft: DraftModel | None
) -> StepTask[StepPlan, StepResult]:
    """Return the task of an engine that generates on this platform. draft: the model, layer or head that drafts, if one does.

    Raises ConfigError if drafts would need rows of steps with one row.
    """
    num_planned = num_planned_drafts(config, model)
    has_rows_of_drafts = config.scheduler.num_speculative_tokens > 0 and draft is None and not num_planned
    if has_rows_of_drafts and resolve_limits(platform, config.scheduler).max_num_seqs == 1:
        raise ConfigError(
            "--num-speculative-tokens: drafts from the request take further rows of a step; --max-num-seqs must be at least 2"
        )
    options = ResultOptions(config.model.logprobs_mode, config.model.enable_return_routed_experts)
    return speculative_task(generation_task(platform, options), draft, options, num_planned)
