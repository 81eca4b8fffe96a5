"""Lower bounds of a model's step times: the larger of bytes / bandwidth and operations / arithmetic rate.

A step of B rows with C tokens each:  max(weights / BW, 2 x multiplied weights x B / FLOPS) + KV bytes x C x B / BW
                                      + 2 x bytes of a recurrent state x B / BW, since each is read and written
A prompt of T tokens, in chunks of c: sum over chunks of max(weights / BW, 2 x multiplied weights x c / FLOPS)
                                      + 4 x query width x attended pairs / FLOPS of activations
Where an indexer chooses what queries attend to, C counts up to its choice; its keys are read, and its scores multiplied, for all.
To both come the bytes of collectives between devices / bandwidth of the links. All per device. Experts count if a token
selects them: see `Sizes.step_bytes`. Launches, latencies and sampling are not counted, so that no engine is faster that
does not overlap collectives with its arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from jaxserve.tools.planning.collectives import Links, step_collectives
from jaxserve.tools.planning.devices import Rates
from jaxserve.tools.planning.sizes import Sizes

Bound = Literal["weights", "arithmetic", "kv", "exchange"]
"""Longest part: reading weights, multiplying, reading keys, values and states, or collectives between devices."""
NO_LINKS: Final = Links(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class DecodeBound:
    """One step that decodes a token for each of `num_requests` rows of `context` tokens."""

    num_requests: int
    context: int
    step_s: float
    tokens_per_s: float
    limited_by: Bound
    fits: bool
    """True if the KV cache holds as many requests of that length, and the scheduler runs them together."""


@dataclass(frozen=True, slots=True)
class PrefillBound:
    """One prompt alone, until its first token."""

    num_tokens: int
    seconds: float
    tokens_per_s: float
    limited_by: Bound


def decode_bound(
    sizes: Sizes,
    rates: Rates,
    kv_itemsize: int,
    num_requests: int,
    context: int,
    links: Links = NO_LINKS,
    num_hosts: int = 1,
    *,
    fits: bool,
) -> DecodeBound:
    """Return the shortest possible time of a decode step."""
    decoder = sizes.decoder
    per_token = decoder.kv_width * kv_itemsize // sizes.kv_shards  # of one layer
    weights_s = sizes.step_bytes(num_requests) / rates.bytes_per_s
    arithmetic_s = 2 * sizes.num_matmul_weights * num_requests / sizes.num_devices / rates.of(sizes.arithmetic)
    scored = (
        sizes.scored_numbers(context) * kv_itemsize // sizes.rules.count("pages")
    )  # each device of a rank has all keys
    read = per_token * sizes.attended_tokens(context) + scored
    kv_s = (read + 2 * sizes.state_bytes) * num_requests / rates.bytes_per_s
    exchange_s = links.seconds(step_collectives(sizes, num_requests, num_requests, num_hosts))
    step_s = max(weights_s, arithmetic_s) + kv_s + exchange_s
    bound = _longest(weights=weights_s, arithmetic=arithmetic_s, kv=kv_s, exchange=exchange_s)
    return DecodeBound(num_requests, context, step_s, num_requests / step_s, bound, fits)


def prefill_bound(
    sizes: Sizes, rates: Rates, num_tokens: int, chunk: int, links: Links = NO_LINKS, num_hosts: int = 1
) -> PrefillBound:
    """Return the shortest possible time of a prompt that is computed `chunk` tokens per step."""
    decoder = sizes.decoder
    flops = rates.of(sizes.arithmetic) * sizes.num_devices
    attention_flops = rates.of("float32" if sizes.activation_itemsize == 4 else "bfloat16") * sizes.num_devices
    full, rest = divmod(num_tokens, chunk)
    chunks = [chunk] * full + ([rest] if rest else [])
    weights_s = [sizes.step_bytes(size) / rates.bytes_per_s for size in chunks]
    matmuls_s = [2 * (sizes.num_layer_weights * size + sizes.num_head_weights) / flops for size in chunks]
    attention_s = 2 * decoder.pair_width * sizes.attended_pairs(num_tokens) / attention_flops
    attention_s += 2 * sizes.scoring_work(num_tokens) * sizes.num_devices / attention_flops
    exchange_s = sum(links.seconds(step_collectives(sizes, size, 1, num_hosts)) for size in chunks)
    seconds = sum(map(max, weights_s, matmuls_s)) + attention_s + exchange_s
    bound = _longest(weights=sum(weights_s), arithmetic=sum(matmuls_s) + attention_s, exchange=exchange_s)
    return PrefillBound(num_tokens, seconds, num_tokens / seconds, bound)


def _longest(weights: float, arithmetic: float, exchange: float, kv: float = 0.0) -> Bound:
    if exchange > max(weights, arithmetic, kv):
        return "exchange"
    if kv > max(weights, arithmetic):
        return "kv"
    return "arithmetic" if arithmetic > weights else "weights"
