"""block_matmul by the native kernels: blocks are read once and dequantised in registers."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from jaxserve_kernels import native
from jaxserve_kernels.block_kinds import TILE, BlockKind

_TARGET = "jaxserve_block_matmul"


def is_built() -> bool:
    """Return True if the library of this host has the kernel."""
    return native.has(_TARGET)


def block_matmuls(
    x: Float[Array, "T I"],
    tiles: Sequence[UInt8[Array, "_ B Y"]],
    num_rows: Int[Array, ""] | None,
    *,
    kind: BlockKind,
    dynamic: bool,
) -> list[Float[Array, "T _"]]:
    """See `api.block_matmuls`; activations are taken in float32, and padding rows come out as zeros at no cost."""
    count = jnp.int32(x.shape[0]) if num_rows is None else num_rows
    return _multiply(x, [each[None] for each in tiles], count[None], kind, dynamic)


def grouped_block_matmul(
    x: Float[Array, "T I"],
    tiles: UInt8[Array, "E R B Y"],
    group_sizes: Int[Array, "E"],
    *,
    kind: BlockKind,
    dynamic: bool,
) -> Float[Array, "T O"]:
    """See `api.grouped_block_matmul`; activations are taken in float32, and padding rows come out as zeros at no cost."""
    return _multiply(x, [tiles], group_sizes, kind, dynamic)[0]


def _multiply(
    x: Float[Array, "T I"],
    tiles: Sequence[UInt8[Array, "E _ B Y"]],
    group_sizes: Int[Array, "E"],
    kind: BlockKind,
    dynamic: bool,
) -> list[Float[Array, "T _"]]:
    out = [jax.ShapeDtypeStruct((x.shape[0], TILE * each.shape[1]), jnp.float32) for each in tiles]
    operands = (x.astype(jnp.float32), group_sizes.astype(jnp.int32), *tiles)
    return list(jax.ffi.ffi_call(_TARGET, out)(*operands, kind=np.int64(kind.index), dynamic=dynamic))
