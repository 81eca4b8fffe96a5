"""grouped_matmul in plain jax.numpy: the specification, and the implementation where there is no kernel.

Three ways, because of what compilers make of them:

    by_tiles  a loop over tiles of rows of one expert: the specification, and what CPUs take
    by_rows   a matmul for each row, with weights gathered for it. XLA for GPUs makes one kernel of that, which reads
              the weights where they are; without a loop a step of few rows stays one CUDA graph
    ragged    `jax.lax.ragged_dot`, for which XLA for TPUs has a kernel. On CPUs and GPUs XLA multiplies every row with
              every expert, and lays all the weights out anew
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32, Num, UInt8

from jaxserve_kernels import mxfp4, nvfp4
from jaxserve_kernels.matmul import matmul

Weight = Num[Array, "E O I"] | UInt8[Array, "E O P"] | Int32[Array, "E W O"]
OneLevelScales = Float[Array, "E O"] | Float[Array, "E G O"] | UInt8[Array, "E G O"] | None
Scales = OneLevelScales | nvfp4.TwoLevelScales

_LEAST_TILE, _MOST_TILE = 8, 128
"""Rows."""
_TILE_COST_BYTES = 32 << 20
"""Bytes of weights that a GPU reads in the time it takes to start the work of one tile: some 8 us, an estimate."""


def grouped_matmul(
    x: Float[Array, "R I"],
    weight: Weight,
    group_sizes: Int[Array, "E"],
    scales: Scales,
    *,
    dynamic: bool,
) -> Float[Array, "R O"]:
    """See `api.grouped_matmul`."""

    def tiles() -> Array:
        return by_tiles(x, weight, group_sizes, scales, dynamic=dynamic)

    def on_gpu() -> Array:
        if _are_few(x, weight):
            return by_rows(x, weight, group_sizes, scales, dynamic=dynamic)
        return by_tiles(x, weight, group_sizes, scales, dynamic=dynamic, has_fixed_count=True)

    def on_tpu() -> Array:
        return tiles() if scales is not None else ragged(x, weight, group_sizes)

    result: Array = jax.lax.platform_dependent(cuda=on_gpu, tpu=on_tpu, default=tiles)
    return result


def by_tiles(
    x: Float[Array, "R I"],
    weight: Weight,
    group_sizes: Int[Array, "E"],
    scales: Scales,
    *,
    dynamic: bool,
    has_fixed_count: bool = False,
) -> Float[Array, "R O"]:
    """Compute tiles in the order of rows: rows that a tile computes after its expert's last one are overwritten by the next.

    has_fixed_count: compute as many tiles as there can be. A GPU's host waits for every condition that it cannot foresee.
    """

    def multiply(rows: Float[Array, "T I"], expert: Int[Array, ""]) -> Float[Array, "T O"]:
        return _multiply(rows, _matrix(weight, expert), _of(scales, expert), dynamic=dynamic)

    num_outputs = weight.shape[2 if are_words(weight) else 1]
    return over_tiles(x, group_sizes, num_outputs, multiply, has_fixed_count=has_fixed_count)


def over_tiles(
    x: Float[Array, "R I"],
    group_sizes: Int[Array, "E"],
    num_outputs: int,
    multiply: Callable[[Float[Array, "T I"], Int[Array, ""]], Float[Array, "T O"]],
    *,
    has_fixed_count: bool,
) -> Float[Array, "R O"]:
    """Return multiply(rows, expert) of all rows, tile by tile: see `by_tiles`."""
    num_rows, num_experts = len(x), len(group_sizes)
    size = tile_rows(num_rows, num_experts)
    tiles = -(-group_sizes // size)  # (E,) of each expert
    starts, ends = jnp.cumsum(group_sizes) - group_sizes, jnp.cumsum(tiles)
    padded = jnp.pad(x, ((0, size), (0, 0)))

    def go_on(tile: Int[Array, ""], out: Float[Array, "R O"]) -> Float[Array, "R O"]:
        expert = jnp.minimum((ends <= tile).sum(), num_experts - 1)
        start = starts[expert] + (tile - ends[expert] + tiles[expert]) * size
        start = jnp.where(tile < ends[-1], start, num_rows)
        rows = jax.lax.dynamic_slice_in_dim(padded, start, size)
        return jax.lax.dynamic_update_slice_in_dim(out, multiply(rows, expert), start, 0)

    count = most_tiles(num_rows, num_experts) if has_fixed_count else ends[-1]
    nothing = jnp.zeros((num_rows + size, num_outputs), jnp.float32)
    result: Array = jax.lax.fori_loop(0, count, go_on, nothing)
    return result[:num_rows]


def by_rows(
    x: Float[Array, "R I"],
    weight: Weight,
    group_sizes: Int[Array, "E"],
    scales: Scales,
    *,
    dynamic: bool,
) -> Float[Array, "R O"]:
    """Reads the weights of an expert for each of its rows."""
    ends = jnp.cumsum(group_sizes)
    experts = jnp.minimum((ends <= jnp.arange(len(x))[:, None]).sum(1), len(weight) - 1)  # (R,)

    def one(row: Float[Array, "I"], expert: Int[Array, ""]) -> Float[Array, "O"]:
        return _multiply(row[None], weight[expert], _of(scales, expert), dynamic=dynamic)[0]

    return jax.vmap(one)(x, experts)


def ragged(x: Float[Array, "R I"], weight: Float[Array, "E O I"], group_sizes: Int[Array, "E"]) -> Float[Array, "R O"]:
    """For weights without scales."""
    precision = jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    return jax.lax.ragged_dot(
        x.astype(weight.dtype),
        weight.swapaxes(1, 2),
        group_sizes,
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def are_words(weight: Weight) -> bool:
    """Return True for numbers of NVFP4 in words (`tpu_words`)."""
    return bool(weight.dtype == jnp.int32)


def tile_rows(num_rows: int, num_experts: int) -> int:
    """Rows of a tile: about those of an expert."""
    return min(max(_LEAST_TILE, 1 << (num_rows // num_experts).bit_length()), _MOST_TILE)


def most_tiles(num_rows: int, num_experts: int) -> int:
    """So many tiles have all experts at most: each of those with rows has one that need not be full."""
    return num_rows // tile_rows(num_rows, num_experts) + min(num_experts, num_rows)


def _are_few(x: jax.Array, weight: jax.Array) -> bool:
    """Return True if reading an expert's weights again for each row takes less time than starting tile after tile."""
    expert_bytes = weight[0].size * weight.dtype.itemsize
    return len(x) * expert_bytes <= most_tiles(len(x), len(weight)) * (expert_bytes + _TILE_COST_BYTES)


def _multiply(
    x: Float[Array, "T I"], weight: Array, scales: Array | nvfp4.TwoLevelScales | None, *, dynamic: bool
) -> Float[Array, "T O"]:
    """Return the matmul with one expert's matrix."""
    if isinstance(scales, nvfp4.TwoLevelScales):
        return nvfp4.matmul(x, weight, scales)
    if scales is not None and scales.dtype == jnp.uint8:
        return mxfp4.matmul(x, weight, scales)
    return matmul(x, weight, scales, dynamic=dynamic)


def _matrix(weight: Weight, expert: Int[Array, ""]) -> Num[Array, "O _"]:
    """weight[expert], taken as bits: XLA for CPUs would widen all experts first, where their type is none of its own."""
    if weight.dtype not in (jnp.bfloat16, jnp.float8_e4m3fn):
        return weight[expert]
    expert, weight = jax.lax.optimization_barrier((expert, weight))  # nor may it take all their bits out of a loop
    bits = jax.lax.bitcast_convert_type(weight, jnp.dtype(f"uint{8 * weight.dtype.itemsize}"))
    return jax.lax.bitcast_convert_type(bits[expert], weight.dtype)


def _of(scales: Scales, expert: Int[Array, ""]) -> Array | nvfp4.TwoLevelScales | None:
    """Return the scales of one expert's matrix."""
    if isinstance(scales, nvfp4.TwoLevelScales):
        return nvfp4.TwoLevelScales(*(each[expert] for each in scales))
    return None if scales is None else scales[expert]
