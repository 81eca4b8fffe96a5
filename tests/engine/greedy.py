"""A sampler for tests that compare greedy tokens: half of the time a step program compiles goes into the options of the real one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.sampling.draw import most_likely
from jaxserve.sampling.params import PADDING_ROW, EngineSamplingParams, device_row
from jaxserve.sampling.sampler import RowState, Sampled
from jaxserve.types import MAX_TOP_LOGPROBS, LogprobsMode
from tests.programs import shared_programs


def is_greedy(sampling: EngineSamplingParams) -> bool:
    """Return True if nothing but the most likely tokens is asked of the sampler."""
    has_logprobs = sampling.num_top_logprobs is not None or sampling.num_prompt_logprobs is not None
    return np.array_equal(device_row(sampling), PADDING_ROW) and not has_logprobs


@contextmanager
def greedy_programs() -> Iterator[Path]:
    """Within it, step programs are made with the sampler of this module; gives a folder for them, of which no other engine reads."""
    with (
        mock.patch("jaxserve.runner.steps.sample", _most_likely),
        mock.patch("jaxserve.runner.speculation.rows.sample", _most_likely),
    ):
        yield shared_programs() / "greedy"


def _most_likely(
    logits: Array,
    columns: Array,
    state: RowState,
    num_known: Array,
    num_top_logprobs: Array,
    mode: LogprobsMode = "raw_logprobs",
) -> Sampled:
    """Return the most likely token of each row, without log-probabilities."""
    num_rows = logits.shape[0]
    top = (num_rows, MAX_TOP_LOGPROBS)
    return Sampled(most_likely(logits), jnp.zeros(num_rows), jnp.zeros(top, jnp.int32), jnp.zeros(top))
