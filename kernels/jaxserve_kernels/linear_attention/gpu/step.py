"""One token of every row: a state is read once from its slot, and written once into its slot, in the pool itself.

A warp has 16 columns of a state in registers, and each of its threads an eighth of the rows of four columns. What a key finds in
a column, and what a query reads from it, are sums over the numbers of a thread and over the eight threads of a column. So warps
exchange nothing, and no sum depends on other rows or on how many there are.

Letters: B rows, L layers, Y slots, K key heads, N value heads, H key dim, V value dim, C columns of a program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import fragmented_array
from jaxtyping import Array, Float

from jaxserve_kernels.linear_attention.gpu import COLUMNS, ROW_GROUPS
from jaxserve_kernels.linear_attention.states import PooledStates

_WARPS, _VECTOR = 4, 4
"""Warps of a program; neighbouring columns of a thread, which it reads together."""


@dataclass(frozen=True, slots=True)
class _Kernel:
    """Static facts of one launch."""

    key_dim: int
    value_dim: int
    num_key_heads: int
    num_value_heads: int
    num_slots: int
    has_rate: bool

    @property
    def layout(self) -> Any:
        """The layout of columns `[H, C]`: a warp reads and writes 64 bytes of eight rows at a time."""
        tiles = (self.key_dim, COLUMNS), (self.key_dim, COLUMNS // _WARPS), (self.key_dim // ROW_GROUPS, _VECTOR)
        return plgpu.Layout.TILED(fragmented_array.Tiling(tiles), warp_dims=(-5,), lane_dims=(-4, -3), vector_dim=-1)


class _Refs(NamedTuple):
    """Operands and results in device memory."""

    q: Any
    k: Any
    v: Any
    decay: Any
    rate: Any
    """None without rates."""
    layer: Any
    reads: Any
    writes: Any
    pool: Any
    """Operand and result."""
    out: Any


class _Place(NamedTuple):
    """The columns of one head of a row: the work of a program."""

    row: Any
    key_head: Any
    head: Any
    columns: Any


@jax.jit  # once for all layers
def step(
    q: Float[Array, "B K H"],
    k: Float[Array, "B K H"],
    v: Float[Array, "B N V"],
    decay: Float[Array, "B N"],
    rate: Float[Array, "B N"] | None,
    states: PooledStates,
) -> tuple[Float[Array, "B N V"], Float[Array, "L Y N H V"]]:
    """Return each row's output, and the pool with its new state. DONATES the pool. All numbers are float32.

    A row whose slot in `reads` is negative has no token: its output is zero, and it writes nothing.
    """
    num_rows, num_key_heads, key_dim = q.shape
    _, num_slots, num_value_heads, _, value_dim = states.pool.shape
    kernel = _Kernel(key_dim, value_dim, num_key_heads, num_value_heads, num_slots, rate is not None)
    launch = plgpu.kernel(
        lambda *refs: _body(kernel, _Refs(*refs[:4], refs[4] if kernel.has_rate else None, *refs[-5:])),
        out_type=jax.ShapeDtypeStruct(v.shape, jnp.float32),
        grid=(num_rows * num_value_heads * (value_dim // COLUMNS),),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=mgpu.LoweringSemantics.Lane),
    )
    rates = () if rate is None else (rate,)
    # XLA would pass the address of a part of another array, and Mosaic refuses addresses that are not aligned.
    operands = jax.lax.optimization_barrier(
        (q, k, v, decay, *rates, jnp.full((1,), states.layer, jnp.int32), states.reads, states.writes)
    )
    pool = jax.new_ref(states.pool)
    out = launch(*operands, pool)
    return out, jax.freeze(pool)


def _body(kernel: _Kernel, refs: _Refs) -> None:
    program, blocks = jax.lax.axis_index("program"), jnp.int32(kernel.value_dim // COLUMNS)
    index, block = jax.lax.div(program, blocks), jax.lax.rem(program, blocks)
    heads = jnp.int32(kernel.num_value_heads)
    row, head = jax.lax.div(index, heads), jax.lax.rem(index, heads)
    key_head = jax.lax.div(head, jnp.int32(kernel.num_value_heads // kernel.num_key_heads))
    columns = pl.ds(pl.multiple_of(block * COLUMNS, COLUMNS), COLUMNS)
    place, slot = _Place(row, key_head, head, columns), refs.reads[row]

    @pl.when(slot >= 0)
    def _() -> None:
        _update(kernel, refs, place, slot)

    @pl.when(slot < 0)
    def _() -> None:
        nothing = plgpu.layout_cast(jnp.zeros((COLUMNS,), jnp.float32), kernel.layout.reduce(0))
        _store(refs.out.at[row, head, columns], nothing)


def _update(kernel: _Kernel, refs: _Refs, place: _Place, slot: Any) -> None:
    layer, writes = refs.layer[0], refs.writes[place.row]
    state = _load(refs.pool.at[layer, slot, place.head, :, place.columns], kernel.layout)
    state = state * refs.decay[place.row, place.head]
    key, query = (
        _across(kernel, _load(ref.at[place.row, place.key_head], kernel.layout.reduce(1))) for ref in (refs.k, refs.q)
    )
    added = _load(refs.v.at[place.row, place.head, place.columns], kernel.layout.reduce(0))
    if kernel.has_rate:
        added = refs.rate[place.row, place.head] * (added - jnp.sum(state * key, axis=0))
    state = state + key * _down(kernel, added)
    _store(refs.out.at[place.row, place.head, place.columns], jnp.sum(state * query, axis=0))

    @pl.when(writes < kernel.num_slots)
    def _() -> None:
        _store(refs.pool.at[layer, writes, place.head, :, place.columns], state)


def _across(kernel: _Kernel, vector: Array) -> Array:
    """Return the numbers of a key or a query for each column: [H, C]."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(vector, (kernel.key_dim, COLUMNS), (0,)), kernel.layout)


def _down(kernel: _Kernel, vector: Array) -> Array:
    """Return the number of a column for each of its rows: [H, C]."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(vector, (kernel.key_dim, COLUMNS), (1,)), kernel.layout)


def _load(ref: Any, layout: Any) -> Array:
    found: Array = plgpu.load(ref, layout=layout, optimized=False)
    return found


def _store(ref: Any, values: Array) -> None:
    if hasattr(plgpu, "store"):
        plgpu.store(ref, values, optimized=False)
    else:  # jax 0.11
        ref[...] = values
