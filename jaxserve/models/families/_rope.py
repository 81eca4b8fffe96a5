"""Rotary embedding keys: `rope_theta` with `rope_scaling`, or `rope_parameters` since transformers 5.

Defaults are resolved: a RopeScaling returned here has every field that its kind uses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from jaxserve.model_config.rope import QueryScaling, RopeScaling
from jaxserve.models.families._keys import Keys

MAX_POSITION = 1 << 27
MAX_FACTOR = 4096.0
_ORIGINAL: Final = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class Rope:
    """Positions and rotary embedding of a config."""

    max_position: int
    theta: float
    scaling: RopeScaling | None
    rotary_dim: int | None = None
    """Dimensions of a head that rotate; None: all."""


def read_rope(keys: Keys, head_dim: int, *, is_partial: bool = False) -> Rope:
    """Read positions as transformers does: `rope_scaling` wins over `rope_parameters`, an inner theta over an outer.

    yarn stretches a context of known length, so the longest is at least factor * that length. dynamic keeps the declared
    length: up to there it changes nothing, and beyond it cached keys would need other frequencies.
    is_partial: True if the family reads `partial_rotary_factor`; otherwise the whole head must rotate.
    """
    declared, table = _declared(keys), _table(keys)
    theta = (table if "rope_theta" in table.table else keys).number("rope_theta", low=1.0)
    if is_partial:
        rotary_dim = _rotary_dim(table if "partial_rotary_factor" in table.table else keys, head_dim)
        scaled = _scaled(keys, table, theta, declared, rotary_dim)
        return scaled if rotary_dim == head_dim else replace(scaled, rotary_dim=rotary_dim)
    table.require("partial_rotary_factor", 1.0, None)
    return _scaled(keys, table, theta, declared, head_dim)


def _declared(keys: Keys) -> int:
    """Return the declared length. With dual chunk attention (Qwen2.5-1M, arXiv 2501.15383), which is not computed, it is that of a chunk,
    within which attention is as in other models."""
    declared, name = keys.integer("max_position_embeddings", MAX_POSITION), "dual_chunk_attention_config"
    table = keys.get(name)
    if not table:
        return declared
    if not isinstance(table, dict):
        raise keys.error(name, "a table")
    return min(declared, Keys(table, f"{name}.").integer("chunk_size", MAX_POSITION))


def _scaled(keys: Keys, table: Keys, theta: float, declared: int, rotary_dim: int) -> Rope:
    kind = table.get("rope_type") or table.get("type") or "default"
    match kind:
        case "default":
            return Rope(declared, theta, None)
        case "linear":
            return Rope(declared, theta, RopeScaling("linear", _factor(table)))
        case "dynamic":
            return Rope(declared, theta, RopeScaling("dynamic", _factor(table), original_max_position=declared))
        case "llama3":
            return Rope(declared, theta, _llama3(table, _original(keys, table, declared)))
        case "yarn":
            original = _original(keys, table, declared)
            scaling = _yarn(table, original, declared)
            return Rope(max(declared, int(scaling.factor * original)), theta, scaling)
        case "longrope":
            original = _original(keys, table, declared, low=2)  # a divisor is its logarithm
            return Rope(declared, theta, _longrope(table, original, declared, rotary_dim))
        case _:
            raise table.error(
                "rope_type" if table.get("rope_type") else "type", "default, linear, dynamic, llama3, yarn, longrope"
            )


def query_scaling(keys: Keys) -> QueryScaling | None:
    """Read the factor on queries from a table of yarn: `llama_4_scaling_beta`, a step every original length. None if it is always 1."""
    table = _table(keys)
    table.require("rope_type", "yarn", None)
    if table.get("llama_4_scaling_beta") == 0:
        return None
    return QueryScaling(table.number("llama_4_scaling_beta"), table.integer(_ORIGINAL, MAX_POSITION))


def mscale_all_dim(keys: Keys) -> float:
    """Return the factor that DeepSeek's yarn puts on queries and on keys: that of the key `mscale_all_dim`."""
    table = _table(keys)
    kind = table.get("rope_type") or table.get("type") or "default"
    if kind == "default" or not table.get("mscale_all_dim"):
        return 1.0
    return _mscale(_factor(table), table.number("mscale_all_dim"))


def without_sections(keys: Keys) -> Keys:
    """Read a rope table of three positions per token (`mrope_section`), which are the same in texts, as that of one."""
    for name in ("rope_scaling", "rope_parameters"):
        table = keys.get(name)
        if isinstance(table, dict) and "mrope_section" in table:
            kinds = {key: "default" for key in ("type", "rope_type") if table.get(key) == "mrope"}
            return Keys({**keys.table, name: {**table, **kinds}}, keys.prefix)
    return keys


def by_layer_type(keys: Keys, sliding_theta: float, *, fraction: float | None = None) -> tuple[Keys, float]:
    """Return keys with the rope of full-attention layers, and the rope base of sliding-window layers.

    transformers 5 has a table for each kind. Before, `rope_theta` and `rope_scaling` belonged to full-attention layers,
    and another key held the base of the others: `sliding_theta`.
    fraction: default of `partial_rotary_factor`, which both kinds share; None: whole heads rotate in sliding-window layers.
    """
    name, table = "rope_parameters", keys.get("rope_parameters")
    if not isinstance(table, dict) or not any(isinstance(value, dict) for value in table.values()):
        return keys, sliding_theta
    full, sliding = (table.get(f"{kind}_attention") or {} for kind in ("full", "sliding"))
    if not isinstance(full, dict) or not isinstance(sliding, dict):
        raise keys.error(name, "tables full_attention and sliding_attention")
    own = Keys({"rope_theta": sliding_theta, **sliding}, f"{name}.sliding_attention.")
    own.require("rope_type", "default", None)
    name_of_fraction = "partial_rotary_factor"
    accepted = (1.0, None) if fraction is None else (full.get(name_of_fraction, fraction),)
    Keys({name_of_fraction: fraction, **own.table}, own.prefix).require(name_of_fraction, *accepted)
    return Keys({**keys.table, name: full}, keys.prefix), own.number("rope_theta", low=1.0)


def by_fraction(keys: Keys, head_dim: int) -> tuple[Keys, int]:
    """Return keys whose table for sliding-window layers says that whole heads rotate, and the dimensions of a head that do.

    transformers has a fraction in each of the two tables; whole heads rotate if there is none.
    """
    name, fraction = "rope_parameters", "partial_rotary_factor"
    tables = keys.get(name)
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise keys.error(name, "tables full_attention and sliding_attention")
    tables = {kind: {fraction: 1.0, **table} for kind, table in tables.items()}
    sliding = tables.get("sliding_attention", {})
    dim = _rotary_dim(Keys(sliding, f"{name}.sliding_attention."), head_dim)
    return Keys({**keys.table, name: {**tables, "sliding_attention": {**sliding, fraction: 1.0}}}, keys.prefix), dim


def without_proportional(keys: Keys, head_dim: int) -> tuple[Keys, RopeScaling | None]:
    """Return keys whose rope has no kind of its own, and the scaling of a proportional one."""
    table = keys.get("rope_parameters") or {}
    if not isinstance(table, dict) or table.get("rope_type") != "proportional":
        return keys, None
    own = Keys({"factor": 1.0, "partial_rotary_factor": 1.0, **table}, "rope_parameters.full_attention.")
    num_pairs = int(own.number("partial_rotary_factor", high=1.0) * head_dim // 2)
    if not num_pairs:
        raise own.error("partial_rotary_factor", f"at least one pair of a head of {head_dim}")
    scaling = RopeScaling("proportional", own.number("factor", low=1.0, high=MAX_FACTOR), num_pairs=num_pairs)
    rest = {key: value for key, value in table.items() if key not in ("factor", "partial_rotary_factor")}
    return Keys({**keys.table, "rope_parameters": {**rest, "rope_type": "default"}}, keys.prefix), scaling


def _table(keys: Keys) -> Keys:
    for key in ("rope_scaling", "rope_parameters"):
        table = keys.get(key)
        if not table:
            continue
        if not isinstance(table, dict) or any(isinstance(value, dict) for value in table.values()):
            raise keys.error(key, "one flat table for all layers")
        return Keys(table, f"{key}.")
    return Keys({}, "rope_parameters.")


def _original(keys: Keys, table: Keys, declared: int, *, low: int = 1) -> int:
    """Return the length before stretching: the outer key wins, as in transformers; the default is the declared maximum."""
    name = _ORIGINAL
    if keys.get(name) is not None:
        return keys.integer(name, MAX_POSITION, low=low)
    return declared if table.get(name) is None else table.integer(name, MAX_POSITION, low=low)


def _llama3(table: Keys, original: int) -> RopeScaling:
    low = table.number("low_freq_factor")
    high = table.number("high_freq_factor")
    if high < low:
        raise table.error("high_freq_factor", f"a number from low_freq_factor ({low:g}) on")
    return RopeScaling(
        "llama3", _factor(table), original_max_position=original, low_freq_factor=low, high_freq_factor=high
    )


def _yarn(table: Keys, original: int, declared: int) -> RopeScaling:
    factor = declared / original if "factor" in table.table and table.get("factor") is None else _factor(table)
    return RopeScaling(
        "yarn",
        factor,
        original_max_position=original,
        # transformers reads 0 as absent here.
        beta_fast=table.number("beta_fast") if table.get("beta_fast") else 32.0,
        beta_slow=table.number("beta_slow") if table.get("beta_slow") else 1.0,
        attention_factor=_yarn_attention_factor(table, factor),
        truncate=table.flag("truncate") if "truncate" in table.table else True,
    )


def _yarn_attention_factor(table: Keys, factor: float) -> float:
    """Return the factor on cos and sin. Both `mscale` keys together replace the paper's 0.1 ln(factor) + 1."""
    if table.get("attention_factor") is not None:
        return table.number("attention_factor")
    if table.get("mscale") and table.get("mscale_all_dim"):
        return _mscale(factor, table.number("mscale")) / _mscale(factor, table.number("mscale_all_dim"))
    return _mscale(factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(table: Keys, original: int, declared: int, rotary_dim: int) -> RopeScaling:
    factor = declared / original if table.get("factor") is None else table.number("factor", high=MAX_FACTOR)
    if table.get("attention_factor") is not None:
        attention_factor = table.number("attention_factor")
    elif factor <= 1:
        attention_factor = 1.0
    else:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeScaling(
        "longrope",
        factor,
        original_max_position=original,
        attention_factor=attention_factor,
        short_divisors=table.numbers("short_factor", rotary_dim // 2),
        long_divisors=table.numbers("long_factor", rotary_dim // 2),
    )


def _rotary_dim(keys: Keys, head_dim: int) -> int:
    name = "partial_rotary_factor"
    if keys.get(name) is None:
        return head_dim
    rotary_dim = int(head_dim * keys.number(name, high=1.0))
    if rotary_dim < 2 or rotary_dim % 2:
        raise keys.error(name, f"a fraction of a head of {head_dim} that is an even number of dimensions")
    return rotary_dim


def _factor(table: Keys) -> float:
    return table.number("factor", low=1.0, high=MAX_FACTOR)
