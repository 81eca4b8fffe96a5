"""Rows of a batch as the sampler sees them, each with its own request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.runner.slots import SamplerState, slot_row
from jaxserve.sampling import sampler
from jaxserve.sampling.params import EngineSamplingParams, SlotInit, device_row, needs_state
from jaxserve.types import LogprobsMode

FORMER = EngineSamplingParams(
    presence_penalty=2.0, min_tokens=10**6, logit_bias={0: 100.0}, allowed_token_ids=(0,), bad_words=((0,),)
)


NUM_ROWS = 32


@dataclass(frozen=True)
class Row:
    """Logits, options, and the tokens that the request has."""

    logits: np.ndarray
    params: EngineSamplingParams = field(default_factory=EngineSamplingParams)
    prompt: Sequence[int] = (0,)
    output: Sequence[int] = ()
    stops: frozenset[int] = frozenset()

    @property
    def init(self) -> SlotInit:
        tokens = np.array([*self.prompt, *self.output], np.int32)
        return SlotInit(0, self.params, tokens, len(self.prompt), self.stops)

    @property
    def num_known(self) -> int:
        return len(self.prompt) + len(self.output)


@partial(jax.jit, static_argnames="mode")
def _choose(logits, columns, slots, which, positions, top, mode):  # type: ignore[no-untyped-def]
    return sampler.sample(logits, columns, SamplerState(slots, which, logits.shape[1]), positions, top, mode)


@jax.jit
def _adjust(logits, columns, slots, which, num_known):  # type: ignore[no-untyped-def]
    rows = sampler.RowOptions(columns, SamplerState(slots, which, logits.shape[1]), num_known)
    return sampler.adjust(logits, rows)


def _arguments(rows: Sequence[Row]) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return logits, columns, slots in another order than the rows', and the slot of each row.

    The slot of a request that needs no sampler state holds the state of a former one.
    """
    vocab = len(rows[0].logits)
    former = slot_row(SlotInit(0, FORMER, np.arange(min(vocab, 9), dtype=np.int32), 4, frozenset({0})), vocab)
    made = {  # a row may be there many times
        key: (slot_row(row.init, vocab) if needs_state(row.params) else former, device_row(row.params), row.logits)
        for key, row in {id(row): row for row in rows}.items()
    }
    slots, columns, logits = map(np.stack, zip(*(made[id(row)] for row in rows), strict=True))
    return jnp.asarray(logits), jnp.asarray(columns), jnp.asarray(slots[::-1]), jnp.arange(len(rows) - 1, -1, -1)


def choose(
    rows: Sequence[Row],
    positions: np.ndarray | None = None,
    top: int = 0,
    *,
    fill: bool = True,
    mode: LogprobsMode = "raw_logprobs",
) -> sampler.Sampled:
    """Return one token for each row; positions: those the draws depend on, by default the next of each row.

    fill: add greedy rows without options up to NUM_ROWS, so that one program serves most tests.
    """
    known = np.array([row.num_known for row in rows]) if positions is None else positions
    missing = max(0, NUM_ROWS - len(rows)) if fill else 0
    padding = Row(np.zeros_like(rows[0].logits), EngineSamplingParams(temperature=0.0))
    every = jnp.asarray(np.pad(known, (0, missing)), jnp.int32)
    found = _choose(*_arguments([*rows, *[padding] * missing]), every, jnp.int32(top), mode)
    return sampler.Sampled(*(values[: len(rows)] for values in found))


def adjusted(rows: Sequence[Row]) -> np.ndarray:
    """Return the logits that each row's token is chosen from."""
    known = jnp.asarray([row.num_known for row in rows], jnp.int32)
    return np.asarray(_adjust(*_arguments(rows), known))
