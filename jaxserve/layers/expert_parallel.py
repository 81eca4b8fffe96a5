"""Experts split over devices (expert parallelism; Lepikhin et al., arXiv 2006.16668), each device a group of experts.

All devices have all tokens, as the layer before left them. Two ways lead from there to the sum of every token's experts:

    all-reduce   every device computes the rows of its own experts, of all tokens; one all-reduce adds up the parts
    all-to-all   every device sends the rows of its share of the tokens to their experts' devices and gets the results
                 back; an all-gather hands every device the sums of all tokens

Per device and token of D values, over n devices with k experts per token, all-reduce moves 2 D (n - 1) / n values and
all-to-all (1 + 2 k / n) D (n - 1) / n: fewer from n > 2 k on.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.layers.linear import ExpertRows
from jaxserve.layers.policy import Exchange
from jaxserve.layers.routing import Routing, sort_rows, weighted_sum
from jaxserve.sharding.rules import MeshAxes

ComputeRows = Callable[[Float[Array, "R D"], ExpertRows], Float[Array, "R D"]]
"""From rows sorted by expert, and which of them belong to each of this device's experts, to the experts' outputs."""


def uses_all_to_all(exchange: Exchange, num_tokens: int, num_per_token: int, num_groups: int) -> bool:
    """Return True if rows are sent to their experts' devices. Tokens that do not divide evenly are never sent."""
    if exchange == "all-reduce" or num_tokens % num_groups:
        return False
    return exchange == "all-to-all" or num_groups > 2 * num_per_token


def by_all_reduce(
    compute: ComputeRows, x: Float[Array, "T D"], routing: Routing, axes: MeshAxes
) -> Float[Array, "T D"]:
    """Return this device's part of every token's weighted sum: that of its own experts. To be added up over `axes`."""
    num_rows, rank = len(routing.tokens), jax.lax.axis_index(axes)
    by_device = routing.group_sizes.reshape(jax.lax.axis_size(axes), -1)
    sizes = by_device[rank]
    ends = jnp.cumsum(by_device.sum(1))
    count = sizes.sum()
    start = ends[rank] - count
    own_first = (jnp.arange(num_rows) + start) % num_rows
    tokens = routing.tokens[own_first]
    made = compute(x[tokens], routing.sorted_rows(tokens, sizes))
    places = routing.rows - start  # (T, k)
    is_own = (places >= 0) & (places < count)
    own = jnp.where(is_own[:, :, None], made[jnp.where(is_own, places, 0)], 0)
    return (own * routing.weights[:, :, None]).sum(1)


def by_all_to_all(
    compute: ComputeRows, x: Float[Array, "T D"], routing: Routing, axes: MeshAxes
) -> Float[Array, "S D"]:
    """Return the weighted sums of this device's share of the tokens: S = T / n.

    compute: its rows may be parts of sums over other mesh axes; then so are the results.
    """
    num_groups, rank = jax.lax.axis_size(axes), jax.lax.axis_index(axes)
    num_experts, num_choices = len(routing.group_sizes), routing.experts.shape[1]
    own_experts, share = num_experts // num_groups, len(x) // num_groups

    def own(each: Array, size: int) -> Array:
        return jax.lax.dynamic_slice_in_dim(each, rank * size, size)

    # counts[s, e]: rows that device s sends to expert e. Every device has all choices, so none has to be asked.
    choices = routing.experts.reshape(num_groups, -1)
    counts = (choices[:, :, None] == jnp.arange(num_experts)).sum(1, dtype=jnp.int32)
    sent_at = jnp.cumsum(counts, 1) - counts  # a sender's rows are sorted by expert
    by_device = counts.sum(0).reshape(num_groups, own_experts)
    kept_at = (jnp.cumsum(by_device, 1) - by_device).reshape(-1) + jnp.cumsum(counts, 0) - counts
    mine = (slice(None), own(jnp.arange(num_experts), own_experts))  # of every sender, for this device's experts

    tokens, rows = sort_rows(own(routing.experts, share))
    most = len(x) * min(num_choices, own_experts)
    kept = jnp.zeros((most, x.shape[1]), x.dtype)
    sent = own(x, share)[tokens]
    sizes, kept_sizes = counts[rank], counts[mine].reshape(-1)
    kept = send(sent, kept, (sent_at[rank], sizes, kept_at[rank], kept_sizes), axes)
    made = compute(kept, _received(routing, by_device, rank, most)).astype(x.dtype)
    back = (kept_at[mine].reshape(-1), kept_sizes, sent_at[mine].reshape(-1), sizes)
    returned = send(made, jnp.zeros_like(sent), back, axes)
    return weighted_sum(returned, rows, own(routing.weights, share))


def _received(routing: Routing, by_device: Int[Array, "n E2"], rank: Int[Array, ""], num_rows: int) -> ExpertRows:
    """Return the sizes and the adapters of the rows that this device has received.

    by_device: rows of each device's experts. An expert's rows come in the order of their senders, hence of their tokens,
    as in `routing.tokens`; so tokens are known without being sent.
    """
    sizes = by_device[rank]
    if routing.adapters is None:
        return ExpertRows(sizes)
    counts = by_device.sum(1)
    first = jnp.cumsum(counts)[rank] - counts[rank]
    places = jnp.minimum(first + jnp.arange(num_rows), len(routing.tokens) - 1)
    return routing.sorted_rows(routing.tokens[places], sizes)


Slices = tuple[Int[Array, "C"], Int[Array, "C"], Int[Array, "C"], Int[Array, "C"]]
"""Positions of slices: where each begins at its sender, its rows, where it begins at its receiver, and the rows of those that arrive."""


def send(rows: Float[Array, "R D"], into: Float[Array, "R2 D"], slices: Slices, axes: MeshAxes) -> Float[Array, "R2 D"]:
    """Send slices of rows to the devices along `axes`: C / n consecutive slices to each. See `jax.lax.ragged_all_to_all`.

    CPUs have no such collective: there every device gets all rows and takes its own.
    """

    def ragged() -> Array:
        sent: Array = jax.lax.ragged_all_to_all(rows, into, *slices, axis_name=axes)
        return sent

    return jax.lax.platform_dependent(  # type: ignore[no-any-return]
        tpu=ragged, cuda=ragged, default=lambda: send_by_all_gather(rows, into, slices, axes)
    )


def send_by_all_gather(
    rows: Float[Array, "R D"], into: Float[Array, "R2 D"], slices: Slices, axes: MeshAxes
) -> Float[Array, "R2 D"]:
    """Compute what `jax.lax.ragged_all_to_all` computes, by all-gathers."""
    num_devices, rank = jax.lax.axis_size(axes), jax.lax.axis_index(axes)
    sent_at, sizes, kept_at = (
        jax.lax.all_gather(each, axes).reshape(num_devices, num_devices, -1)[:, rank] for each in slices[:3]
    )  # (senders, slices to this device)
    places = jnp.arange(len(into))[:, None, None]
    is_here = (places >= kept_at) & (places < kept_at + sizes)
    sources = sent_at + places - kept_at + len(rows) * jnp.arange(num_devices)[:, None]
    source = jnp.where(is_here, sources, 0).sum((1, 2))
    everything = jax.lax.all_gather(rows, axes, tiled=True)
    return jnp.where(is_here.any((1, 2))[:, None], everything[source], into)
