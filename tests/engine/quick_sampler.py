"""A sampler for tests that ask for tokens and their log-probabilities: half of the time a step program compiles goes into the other
options of the real one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxserve.sampling.draw import most_likely
from jaxserve.sampling.params import COLUMNS, PADDING_ROW, EngineSamplingParams, device_row
from jaxserve.sampling.sampler import RowOptions, RowState, Sampled, score
from jaxserve.types import LogprobsMode
from tests.programs import shared_programs

_OPTIONS = ("temperature", "seed")
_IS_OTHER = np.array([name not in _OPTIONS for name in COLUMNS])


def needs_other_options(sampling: EngineSamplingParams) -> bool:
    """Return True if a request has an option that this sampler does not know."""
    return not np.array_equal(device_row(sampling)[_IS_OTHER], PADDING_ROW[_IS_OTHER])


@contextmanager
def quick_programs() -> Iterator[Path]:
    """Within it, step programs are made with the sampler of this module; gives a folder for them, of which no other engine reads."""
    with (
        mock.patch("jaxserve.runner.steps.sample", sample),
        mock.patch("jaxserve.runner.speculation.rows.sample", sample),
    ):
        yield shared_programs() / "quick"


def sample(
    logits: Array,
    columns: Array,
    state: RowState,
    num_known: Array,
    num_top_logprobs: Array,
    mode: LogprobsMode = "raw_logprobs",
) -> Sampled:
    """Choose each row's next token from its logits, temperature, seed and position; log-probabilities are raw."""
    assert mode == "raw_logprobs", "engines of other modes have all options"
    rows = RowOptions(columns, state, num_known)
    noise = _gumbel(rows.value("seed"), num_known, logits.shape[1])
    token_ids = most_likely(logits + rows.value("temperature")[:, None] * noise)
    scored = score(logits, token_ids, num_top_logprobs)
    return Sampled(token_ids, scored.logprobs, scored.top_token_ids, scored.top_logprobs)


def _gumbel(seeds: Array, positions: Array, vocab_size: int) -> Array:
    """Return noise that makes the largest sum a draw from the softmax; it depends on seed, position and token."""
    row = seeds.astype(jnp.uint32) * np.uint32(0x9E3779B1) ^ positions.astype(jnp.uint32) * np.uint32(0x85EBCA77)
    bits = row[:, None] ^ jax.lax.iota(jnp.uint32, vocab_size) * np.uint32(0xC2B2AE3D)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        bits = (bits ^ bits >> shift) * np.uint32(factor)
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) / 2**23
    return -jnp.log(-jnp.log(uniform))
