"""From logits to tokens, for a batch in which every row has its own options.

The stages run in the order of `params.STAGES`: biases; penalties in the order repetition, frequency, presence, as in
vLLM; masks; temperature; top_k, top_p, min_p; the draw. A row's result depends on its own logits, options, state, seed
and position only. Work that no row asks for is skipped at run time (`lax.cond`), so one program serves every mix of
options.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial, reduce
from types import ModuleType
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve_kernels.alike import wide_alike
from jaxtyping import Array, Bool, Float, Int

from jaxserve.sampling import biases, cuts, draw, logprobs, masks, penalties, scaling
from jaxserve.sampling.cuts import candidates
from jaxserve.sampling.draw import categorical, most_likely
from jaxserve.sampling.params import COLUMNS, DEFAULTS, STAGES, Stage, column_dtype, column_value
from jaxserve.sampling.rows import count, entries
from jaxserve.sampling.topk import top_k
from jaxserve.sampling.transform import StateField, Transform
from jaxserve.types import MAX_TOP_LOGPROBS, NO_LOGPROBS, LogprobsMode

_MODULES: Final[Mapping[Stage, ModuleType]] = {
    "biases": biases,
    "penalties": penalties,
    "masks": masks,
    "scaling": scaling,
    "cuts": cuts,
    "draw": draw,
    "logprobs": logprobs,
}
_ADJUSTING: Final[tuple[Stage, ...]] = ("biases", "penalties", "masks")
"""Stages that run only in steps in which a row asks for one of their options."""
_NEVER: Final = float(np.finfo(np.float32).min)
"""The logit of a token that cannot be drawn, in processed log-probabilities. Finite, so that it sorts before padding."""
_NEUTRAL: Final = {name: column_value(DEFAULTS[name]) for name in COLUMNS}
_NEUTRAL_BITS: Final = np.array([np.array(_NEUTRAL[name], column_dtype(name)).view(np.int32) for name in COLUMNS])
_PLACES: Final = {name: i for i, name in enumerate(COLUMNS)}
BY_STAGE: Final[Mapping[Stage, tuple[str, ...]]] = {
    stage: tuple(name for name, option in COLUMNS.items() if option.stage == stage) for stage in STAGES
}


def transform_of(name: str, stage: Stage) -> Transform[..., Any]:
    """Return the device half of an option. Raises RuntimeError if it is missing or differs from what is declared."""
    module = _MODULES[stage]
    found = getattr(module, name, None)
    if not callable(found):
        raise RuntimeError(f"sampling option '{name}': {module.__name__} has no function of this name")
    transform = found if isinstance(found, Transform) else Transform(found)
    if bool(transform.state) != COLUMNS[name].keeps_state:
        raise RuntimeError(
            f"sampling option '{name}': {module.__name__} and params.py differ on whether it keeps state"
        )
    return transform


TRANSFORMS: Final[Mapping[str, Transform[..., Any]]] = {
    name: transform_of(name, stage) for stage, names in BY_STAGE.items() for name in names
}
"""The device half of each option, by its name."""
STATE_FIELDS: Final = tuple(
    sorted(
        dict.fromkeys(field for transform in TRANSFORMS.values() for field in transform.state),
        key=lambda field: field.after_token is None,
    )
)
"""The state of all options; fields that change with every token are first."""


class Sampled(NamedTuple):
    """One sampled token per row and its log-probabilities, of the mode that `sample` was called with."""

    token_ids: Int[Array, "B"]
    logprobs: Float[Array, "B"]
    top_token_ids: Int[Array, "B 20"]
    top_logprobs: Float[Array, "B 20"]


class Scored(NamedTuple):
    """Log-probabilities of given tokens."""

    logprobs: Float[Array, "B"]
    ranks: Int[Array, "B"]
    """1: no token is more likely."""
    top_token_ids: Int[Array, "B 20"]
    top_logprobs: Float[Array, "B 20"]


@runtime_checkable
class RowState(Protocol):
    """The state of each row's request by the names of STATE_FIELDS, `[B, ...]`; undefined for rows that need none."""

    def __getitem__(self, name: str, /) -> Array: ...


class RowOptions:
    """The options of a step's rows with their state.

    Everything is computed where it is asked for, from the columns as they are: a value that comes into a branch of a
    `lax.cond` from outside is an array of its own, and a kernel of its own to compile and to start in every step.
    """

    def __init__(self, columns: Int[Array, "B C"], state: RowState, num_known: Int[Array, "B"]) -> None:
        """num_known: tokens that each row's request has, prompt and output."""
        self._columns, self._state, self._num_known = columns, state, num_known

    def value(self, name: str) -> Array:
        """Return an option of each row, `[B]`, a float restored from its bits."""
        column = self._columns[:, _PLACES[name]]
        return column if column_dtype(name) == "int32" else jax.lax.bitcast_convert_type(column, jnp.float32)

    def active(self, names: Sequence[str]) -> Bool[Array, "B"]:
        """Return the rows in which any of these options does something."""
        plain = [name for name in names if TRANSFORMS[name].is_active is None]
        narrow = [self._is_active(name) for name in names if name not in plain]
        return reduce(jnp.logical_or, narrow, are_set(self._columns, plain))

    def apply(self, name: str, *inputs: Any) -> Any:
        """Call an option's device half on all rows; options that are not active there have their default."""
        value = self.value(name)
        if TRANSFORMS[name].is_active is not None:
            value = jnp.where(self._is_active(name), value, _NEUTRAL[name])
        return TRANSFORMS[name](*inputs, value, *self._state_of(name))

    def _is_active(self, name: str) -> Bool[Array, "B"]:
        is_set, narrow = are_set(self._columns, [name]), TRANSFORMS[name].is_active
        return is_set if narrow is None else is_set & narrow(self._num_known, *self._state_of(name))

    def _state_of(self, name: str) -> list[Array]:
        return [self._state[field.name] for field in TRANSFORMS[name].state]


def are_set(columns: Int[Array, "B C"], names: Collection[str]) -> Bool[Array, "B"]:
    """Return the rows in which any of these options has another value than its default."""
    is_one = np.array([name in names for name in COLUMNS])
    return ((columns != _NEUTRAL_BITS) & is_one).any(1)


def uses_state(columns: Int[Array, "B C"], field: StateField) -> Bool[Array, "B"]:
    """Return True for rows with an option that reads this state."""
    return are_set(columns, [name for name, transform in TRANSFORMS.items() if field in transform.state])


def sample(
    logits: Float[Array, "B V"],
    columns: Int[Array, "B C"],
    state: RowState,
    num_known: Int[Array, "B"],
    num_top_logprobs: Int[Array, ""],
    mode: LogprobsMode = "raw_logprobs",
) -> Sampled:
    """Choose each row's next token; log-probabilities are filled as far as any are wanted.

    num_known: tokens that each row's request has, which is the position of the new one.
    num_top_logprobs: NO_LOGPROBS leaves out the chosen tokens' as well, a pass over all logits on a CPU.
    mode: raw_logprobs are those of the logits as they are; processed_logprobs those of the distribution that the token
    is drawn from, after every stage up to the cuts. A greedy row is not drawn: its distribution is the one after biases,
    penalties and masks.
    """
    rows = RowOptions(columns, state, num_known)
    adjusts = rows.active([name for stage in _ADJUSTING for name in BY_STAGE[stage]]).any()

    def choose() -> tuple[Array, ...]:
        is_greedy = _is_greedy(rows)
        # Scaling comes inside, since it makes an array of its own anyway: the logits are still needed as they are.
        scaled = jax.lax.cond(
            adjusts, lambda: _changed("scaling", rows, adjust(logits, rows)), lambda: _changed("scaling", rows, logits)
        )
        likely, lowest = most_likely(scaled), _lowest_kept(scaled, rows, ~is_greedy)
        token_ids = jnp.where(is_greedy, likely, _draw(scaled, lowest, rows, num_known))
        if mode == "raw_logprobs":
            return (token_ids,)
        kept = (scaled >= lowest[:, None]) | is_greedy[:, None]
        return token_ids, jnp.where(kept, jnp.maximum(scaled, _NEVER), _NEVER)

    def choose_greedily() -> tuple[Array, ...]:
        return (most_likely(logits), logits) if mode == "processed_logprobs" else (most_likely(logits),)

    token_ids, *processed = jax.lax.cond(_is_greedy(rows).all() & ~adjusts, choose_greedily, choose)
    logits = processed[0] if processed else logits
    normalizer = jax.lax.cond(
        num_top_logprobs > NO_LOGPROBS,
        # XLA turns a branch of nothing but reductions into a select of both, unless something stops it.
        lambda: _normalizer(jax.lax.optimization_barrier(logits)),
        lambda: jnp.zeros_like(logits[:, 0]),
    )
    chosen = entries(logits, token_ids[:, None])[:, 0] - normalizer
    return Sampled(token_ids, chosen, *_top(logits, normalizer, num_top_logprobs, rows))


def _is_greedy(rows: RowOptions) -> Bool[Array, "B"]:
    return rows.value("temperature") == 0


def adjust(logits: Float[Array, "B V"], rows: RowOptions) -> Float[Array, "B V"]:
    """Return the logits after biases, penalties and masks."""
    for stage in _ADJUSTING:
        change = partial(_biased, rows) if stage == "biases" else partial(_changed, stage, rows)
        logits = jax.lax.cond(rows.active(BY_STAGE[stage]).any(), change, lambda x: x, logits)
    return logits


def _biased(rows: RowOptions, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
    entries = [rows.apply(name) for name in BY_STAGE["biases"]]
    ids, amounts = (jnp.concatenate(parts, 1) for parts in zip(*entries, strict=True))
    return logits.at[jnp.arange(logits.shape[0])[:, None], ids].add(amounts, mode="drop")


def _changed(stage: Stage, rows: RowOptions, inputs: Array) -> Array:
    """Apply the options of a stage, each to the result of the one before."""
    return reduce(lambda x, name: rows.apply(name, x), BY_STAGE[stage], inputs)


def score(logits: Float[Array, "B V"], token_ids: Int[Array, "B"], num_top_logprobs: Int[Array, ""]) -> Scored:
    """Return the log-probabilities and ranks of given tokens; the most likely ones only if any are wanted."""
    normalizer = _normalizer(logits)
    chosen = entries(logits, token_ids[:, None])
    ranks = count(logits > chosen) + 1
    return Scored(chosen[:, 0] - normalizer, ranks, *_top(logits, normalizer, num_top_logprobs))


def _top(
    logits: Float[Array, "B V"],
    normalizer: Float[Array, "B"],
    num_top_logprobs: Int[Array, ""],
    rows: RowOptions | None = None,
) -> tuple[Int[Array, "B 20"], Float[Array, "B 20"]]:
    """Return the most likely tokens, or those that `rows` ask for, and their log-probabilities; undefined if none are wanted."""

    def top() -> tuple[Array, Array]:
        _, likely = top_k(logits, MAX_TOP_LOGPROBS)
        is_missing = jnp.arange(MAX_TOP_LOGPROBS) >= likely.shape[1]  # in a vocabulary of fewer than 20 tokens
        ids = jnp.pad(likely, ((0, 0), (0, MAX_TOP_LOGPROBS - likely.shape[1])))
        if rows is not None:
            ids = _changed("logprobs", rows, ids)
        values = entries(logits, ids) - normalizer[:, None]
        return ids, jnp.where(is_missing, -jnp.inf, values)

    shape = (logits.shape[0], MAX_TOP_LOGPROBS)
    return jax.lax.cond(  # type: ignore[no-any-return]
        num_top_logprobs > 0, top, lambda: (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))
    )


def _lowest_kept(scaled: Float[Array, "B V"], rows: RowOptions, draws: Bool[Array, "B"]) -> Float[Array, "B"]:
    """Return the smallest logit that the cuts keep in each row. draws: rows whose result is used."""

    def threshold() -> Array:
        found = candidates(scaled)
        for name in BY_STAGE["cuts"]:
            found = found._replace(kept=jnp.maximum(found.kept, rows.apply(name, found)))
        return found.kept

    is_cut = (rows.active(BY_STAGE["cuts"]) & draws).any()
    return jax.lax.cond(is_cut, threshold, lambda: jnp.full(scaled.shape[0], -jnp.inf))  # type: ignore[no-any-return]


def _draw(
    scaled: Float[Array, "B V"], lowest: Float[Array, "B"], rows: RowOptions, positions: Int[Array, "B"]
) -> Int[Array, "B"]:
    """Sample from softmax(scaled), restricted to logits of `lowest` or more."""
    scaled = wide_alike(scaled)
    weights = jnp.where(scaled >= lowest[:, None], jnp.exp(scaled - scaled.max(-1, keepdims=True)), 0.0)
    (uniforms,) = (rows.apply(name, positions) for name in BY_STAGE["draw"])
    return categorical(weights, uniforms)


def _normalizer(logits: Float[Array, "B V"]) -> Float[Array, "B"]:
    """Return what logits exceed log-probabilities by."""
    logits = wide_alike(logits)
    best = logits.max(-1)
    return best + jnp.log(jnp.exp(logits - best[:, None]).sum(-1))
