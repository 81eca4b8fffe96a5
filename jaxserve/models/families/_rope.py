"""Rotary embedding keys: `rope_theta` with `rope_scaling` (old spelling) or `rope_parameters` (transformers 5).

Promises resolved defaults: a RopeScaling returned here has every field its kind uses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxserve.models.config import RopeScaling
from jaxserve.models.families._keys import Keys

MAX_POSITION = 1 << 27
MAX_FACTOR = 4096.0


@dataclass(frozen=True, slots=True)
class Rope:
    """What a config says about positions."""

    max_position: int
    theta: float
    scaling: RopeScaling | None


def read_rope(keys: Keys) -> Rope:
    """Positions as transformers reads them: `rope_scaling` wins over `rope_parameters`, an inner theta over an outer.

    yarn stretches a context of known length, so the longest is at least factor * that length. dynamic keeps the declared
    length: up to there it changes nothing, and beyond it the keys already cached would need other frequencies.
    """
    declared = keys.integer("max_position_embeddings", MAX_POSITION)
    table = _table(keys)
    theta = (table if "rope_theta" in table.table else keys).number("rope_theta", low=1.0)
    table.require("partial_rotary_factor", 1.0, None)
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
        case _:
            raise table.refusal(
                "rope_type" if table.get("rope_type") else "type", "default, linear, dynamic, llama3, yarn"
            )


def _table(keys: Keys) -> Keys:
    for key in ("rope_scaling", "rope_parameters"):
        table = keys.get(key)
        if not table:
            continue
        if not isinstance(table, dict) or any(isinstance(value, dict) for value in table.values()):
            raise keys.refusal(key, "one flat table for all layers")
        return Keys(table, f"{key}.")
    return Keys({}, "rope_parameters.")


def _original(keys: Keys, table: Keys, declared: int) -> int:
    """The length before stretching: the outer key wins, as in transformers; absent, it is the declared maximum."""
    name = "original_max_position_embeddings"
    if keys.get(name) is not None:
        return keys.integer(name, MAX_POSITION)
    return declared if table.get(name) is None else table.integer(name, MAX_POSITION)


def _llama3(table: Keys, original: int) -> RopeScaling:
    low = table.number("low_freq_factor")
    high = table.number("high_freq_factor")
    if high <= low:
        raise table.refusal("high_freq_factor", f"a number above low_freq_factor ({low:g})")
    return RopeScaling(
        "llama3", _factor(table), original_max_position=original, low_freq_factor=low, high_freq_factor=high
    )


def _yarn(table: Keys, original: int, declared: int) -> RopeScaling:
    table.require("truncate", True)
    factor = declared / original if "factor" in table.table and table.get("factor") is None else _factor(table)
    return RopeScaling(
        "yarn",
        factor,
        original_max_position=original,
        # transformers takes 0 as absent here, hence truth and not presence.
        beta_fast=table.number("beta_fast") if table.get("beta_fast") else 32.0,
        beta_slow=table.number("beta_slow") if table.get("beta_slow") else 1.0,
        attention_factor=_yarn_attention_factor(table, factor),
    )


def _yarn_attention_factor(table: Keys, factor: float) -> float:
    """What cos and sin are multiplied by. Both `mscale` keys together replace the paper's 0.1 ln(factor) + 1."""
    if table.get("attention_factor") is not None:
        return table.number("attention_factor")
    if table.get("mscale") and table.get("mscale_all_dim"):
        return _mscale(factor, table.number("mscale")) / _mscale(factor, table.number("mscale_all_dim"))
    return _mscale(factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _factor(table: Keys) -> float:
    return table.number("factor", low=1.0, high=MAX_FACTOR)
