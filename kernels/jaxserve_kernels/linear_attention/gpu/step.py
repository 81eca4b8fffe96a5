"""The tokens of rows, one after the other: a state is read once from its slot, and written once into its slot, in the pool itself.

A warp has 16 columns of a state in registers, or 20, and each of its threads an eighth of the rows of four columns, or five. What a key finds in
a column, and what a query reads from it, are sums over the numbers of a thread and over the eight threads of a column. So warps
exchange nothing, and no sum depends on other rows or on how many there are.

Letters: B rows, T tokens, L layers, Y slots, K key heads, N value heads, H key dim, V value dim, C columns of a program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import fragmented_array
from jaxtyping import Array, Float, Int

from jaxserve_kernels.linear_attention.gpu import COLUMNS, ROW_GROUPS, num_columns
from jaxserve_kernels.paged_attention.gpu.tiles import put
from jaxserve_kernels.states import PooledStates

_MOST_READ_AHEAD = 128
"""Rows of a state beside which there are registers for the next token."""
_WARPS, _VECTOR = 4, 4
"""Warps of a program; neighbouring columns of a thread, which it reads together."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """Compile-time parameters of one launch."""

    key_dim: int
    value_dim: int
    num_key_heads: int
    num_value_heads: int
    num_slots: int
    is_decode: bool
    """True if a row has at most one token."""

    @classmethod
    def of(cls, q: Float[Array, "T K H"], states: PooledStates, *, is_decode: bool) -> Kernel:
        """Return the parameters of a launch with these operands."""
        _, num_slots, num_value_heads, _, value_dim = states.pool.shape
        return cls(q.shape[2], value_dim, q.shape[1], num_value_heads, num_slots, is_decode)

    @property
    def columns(self) -> int:
        """Columns of a program."""
        columns = num_columns(self.value_dim)
        assert columns is not None, "values have a kernel"
        return columns

    def num_programs(self, num_rows: int) -> int:
        return num_rows * self.num_value_heads * (self.value_dim // self.columns)

    @property
    def layout(self) -> Any:
        """The layout of columns `[H, C]`: a warp reads and writes 64 bytes of eight rows at a time, or 16 if it has 20 columns."""
        dim, rows = self.key_dim, self.key_dim // ROW_GROUPS
        of_warp = (dim, self.columns), (dim, self.columns // _WARPS)
        if self.columns == COLUMNS:
            tiling, warp = fragmented_array.Tiling((*of_warp, (rows, _VECTOR))), -5
        else:  # neighbouring columns in four threads, five columns of each
            tiling, warp = fragmented_array.Tiling((*of_warp, (dim, 4), (rows, 1))), -7
        return plgpu.Layout.TILED(tiling, warp_dims=(warp,), lane_dims=(-4, -3), vector_dim=-1)


class Refs(NamedTuple):
    """Operands and results in device memory."""

    q: Any
    k: Any
    v: Any
    decay: Any
    rate: Any
    """None without rates."""
    starts: Any
    """First token of each row, and the one after its last, of those that take the recurrent form."""
    ends: Any
    layer: Any
    reads: Any
    writes: Any
    """None if no state is written."""
    pool: Any
    """Operand, and result if states are written."""
    out: Any = None


class Place(NamedTuple):
    """The columns of one head of a row: the work of a program."""

    row: Any
    key_head: Any
    head: Any
    columns: Any


class _Token(NamedTuple):
    """The numbers of a token that change the columns of a program."""

    query: Any
    key: Any
    value: Any
    decay: Any
    rate: Any
    """None without rates."""


@partial(jax.jit, static_argnames="is_decode")  # once for all layers
def step(
    q: Float[Array, "T K H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T N V"],
    decay: Float[Array, "T N"],
    rate: Float[Array, "T N"] | None,
    states: PooledStates,
    starts: Int[Array, "B"],
    ends: Int[Array, "B"],
    *,
    is_decode: bool,
) -> tuple[Float[Array, "T N V"], Float[Array, "L Y N H V"]]:
    """Return each token's output, and the pool with the rows' new states. DONATES the pool if it writes. All numbers are float32.

    Row b has tokens `starts[b] : ends[b]`, at most one if is_decode. Outputs of other tokens have no meaning. A row without
    tokens reads and writes nothing.
    """
    kernel = Kernel.of(q, states, is_decode=is_decode)
    places = starts, ends, jnp.full((1,), states.layer, jnp.int32), states.reads, states.writes
    # XLA would pass the address of a part of another array, and Mosaic refuses addresses that are not aligned.
    small = jax.lax.optimization_barrier((q, k, v, decay, rate, *places))
    pool: Any = states.pool if states.writes is None else jax.new_ref(states.pool)
    operands, structure = jax.tree.flatten(Refs(*small, pool))
    launch = plgpu.kernel(
        lambda *refs: _body(kernel, jax.tree.unflatten(structure, refs[:-1])._replace(out=refs[-1])),
        out_type=jax.ShapeDtypeStruct(v.shape, jnp.float32),
        grid=(kernel.num_programs(len(starts)),),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=mgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,  # a thread reads nothing that another one writes
        ),
    )
    out = launch(*operands)
    return out, pool if states.writes is None else jax.freeze(pool)


def _body(kernel: Kernel, refs: Refs) -> None:
    place = place_of(kernel, refs)
    start, end = refs.starts[place.row], refs.ends[place.row]

    @pl.when(start < end)
    def _() -> None:
        update(kernel, refs, place, lambda state: after_tokens(kernel, refs, place, state, start, end))


def place_of(kernel: Kernel, refs: Refs) -> Place:
    """Return the work of this program."""
    program, blocks = jax.lax.axis_index("program"), jnp.int32(kernel.value_dim // kernel.columns)
    index, block = jax.lax.div(program, blocks), jax.lax.rem(program, blocks)
    heads = jnp.int32(kernel.num_value_heads)
    # Prompts come after the rows that decode, and take longest: they begin first.
    row, head = refs.reads.shape[0] - 1 - jax.lax.div(index, heads), jax.lax.rem(index, heads)
    key_head = jax.lax.div(head, jnp.int32(kernel.num_value_heads // kernel.num_key_heads))
    columns = kernel.columns
    return Place(row, key_head, head, pl.ds(pl.multiple_of(block * columns, columns), columns))


def update(kernel: Kernel, refs: Refs, place: Place, after: Callable[[Array], Array]) -> None:
    """Read a state from its slot, and write the one after the row's tokens into its slot."""
    layer, row = refs.layer[0], place.row
    state = after(load(refs.pool.at[layer, refs.reads[row], place.head, :, place.columns], kernel.layout))
    if refs.writes is None:
        return
    writes = refs.writes[row]

    @pl.when(writes < kernel.num_slots)
    def _() -> None:
        put(refs.pool.at[layer, writes, place.head, :, place.columns], state)


def after_tokens(kernel: Kernel, refs: Refs, place: Place, state: Array, start: Any, end: Any) -> Array:
    """Return the state after tokens start ... end - 1, and write their outputs."""

    def read(index: Any) -> _Token:
        return _token(kernel, refs, place, index)

    def read_and_take(index: Any, state: Array) -> Array:
        return _updated(kernel, refs, place, state, index, read(index))

    def take(index: Any, carry: tuple[_Token, Array]) -> tuple[_Token, Array]:
        token, state = carry
        following = read(jnp.minimum(index + 1, end - 1))  # it is there when it is used
        return following, _updated(kernel, refs, place, state, index, token)

    if kernel.is_decode:
        return read_and_take(start, state)
    if kernel.key_dim > _MOST_READ_AHEAD:
        return jax.lax.fori_loop(start, end, read_and_take, state)
    first = read(jnp.minimum(start, refs.q.shape[0] - 1))  # a token of the step, even if there is none to take
    _, state = jax.lax.fori_loop(start, end, take, (first, state))
    return state


def _token(kernel: Kernel, refs: Refs, place: Place, index: Any) -> _Token:
    layout = kernel.layout
    query, key = (load(ref.at[index, place.key_head], layout.reduce(1)) for ref in (refs.q, refs.k))
    value = load(refs.v.at[index, place.head, place.columns], layout.reduce(0))
    rate = None if refs.rate is None else refs.rate[index, place.head]
    return _Token(query, key, value, refs.decay[index, place.head], rate)


def _updated(kernel: Kernel, refs: Refs, place: Place, state: Array, index: Any, token: _Token) -> Array:
    """Return the state after a token, and write the token's output."""
    key, added = _across(kernel, token.key), token.value
    state = state * token.decay
    if token.rate is not None:
        added = token.rate * (added - jnp.sum(state * key, axis=0))
    state = state + key * _down(kernel, added)
    found = jnp.sum(state * _across(kernel, token.query), axis=0)
    put(refs.out.at[index, place.head, place.columns], found)
    return state


def _across(kernel: Kernel, vector: Array) -> Array:
    """Return the numbers of a key or a query for each column: [H, C]."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(vector, (kernel.key_dim, kernel.columns), (0,)), kernel.layout)


def _down(kernel: Kernel, vector: Array) -> Array:
    """Return the number of a column for each of its rows: [H, C]."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(vector, (kernel.key_dim, kernel.columns), (1,)), kernel.layout)


def load(ref: Any, layout: Any) -> Array:
    found: Array = plgpu.load(ref, layout=layout, optimized=False)
    return found
