"""Rows with whole chunks: the tokens before and after these one after the other, and chunks by matmuls of tensor cores.

What the tokens of a chunk are to each other does not depend on states: XLA computes it for all chunks of a step at once. What is left goes from
chunk to chunk, in one launch: five matmuls with the state, which stays in registers. A warp has 16 columns of a state, as in `step`, and
exchanges nothing with others; the state passes through shared memory once before and once after the chunks, from one order to the other.

Letters: as in `step`; W whole chunks of a step, C tokens of a chunk, R value heads of a key head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Int

from jaxserve_kernels.linear_attention.chunk import Tokens, within
from jaxserve_kernels.linear_attention.gpu import COLUMNS
from jaxserve_kernels.linear_attention.gpu.fragments import (
    BLOCK,
    SUM,
    add_matmul,
    as_left,
    blocks,
    columns_last,
    empty,
    load_block,
    load_sum,
)
from jaxserve_kernels.linear_attention.gpu.step import Kernel, Place, Refs, after_tokens, load, place_of, update
from jaxserve_kernels.paged_attention.gpu.tiles import put
from jaxserve_kernels.segments import CHUNK, WholeChunks
from jaxserve_kernels.states import PooledStates

assert CHUNK == BLOCK, "a chunk is one block of a matmul"


class Chunks(NamedTuple):
    """Right operands of all whole chunks, see `fragments.blocks`, and decays, see `chunk.Chunk`."""

    queries: BFloat16[Array, "W K HB 2 128 8"]
    """From key dims to tokens."""
    keys: BFloat16[Array, "W K HB 2 128 8"]
    keys_back: BFloat16[Array, "W K HB 2 128 8"]
    """From tokens to key dims."""
    solution: BFloat16[Array, "W N 2 128 8"] | None
    """From tokens to tokens; None without rates."""
    scores: BFloat16[Array, "W N 2 128 8"]
    from_start: Float[Array, "W N C"]
    kept: Float[Array, "W N C"]


class _Places(NamedTuple):
    """The places of rows' whole chunks, in device memory: see `segments.WholeChunks`."""

    firsts: Any
    counts: Any
    starts: Any


def chunks_of(tokens: Tokens, whole: WholeChunks) -> Chunks:
    """Return the operands of the whole chunks of a step."""
    places = whole.starts[:, None] + jnp.arange(CHUNK)  # (W, C)
    q, k, v, log_decay, rate = jax.tree.map(lambda x: x[places], tokens)
    found = jax.vmap(within)(Tokens(q, k, v, log_decay, rate))

    def by_head(x: Float[Array, "W K R *s"]) -> Float[Array, "W N *s"]:
        return x.reshape(len(x), -1, *x.shape[3:])

    def between_tokens(x: Float[Array, "W K R C C"]) -> BFloat16[Array, "W N 2 128 8"]:
        return blocks(by_head(x).swapaxes(-1, -2))[:, :, 0, 0]

    return Chunks(
        blocks(q.transpose(0, 2, 3, 1))[:, :, :, 0],
        blocks(k.transpose(0, 2, 3, 1))[:, :, :, 0],
        blocks(k.swapaxes(1, 2))[:, :, 0],
        None if found.solution is None else between_tokens(found.solution),
        between_tokens(found.scores),
        by_head(found.from_start),
        by_head(found.kept),
    )


@jax.jit  # once for all layers
def chunked_step(
    q: Float[Array, "T K H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T N V"],
    decay: Float[Array, "T N"],
    rate: Float[Array, "T N"] | None,
    chunks: Chunks,
    states: PooledStates,
    starts: Int[Array, "B1"],
    whole: WholeChunks,
) -> tuple[Float[Array, "T N V"], Float[Array, "L Y N H V"]]:
    """Return the outputs of the rows with whole chunks, and the pool with their new states. DONATES the pool if it writes.

    Outputs of other tokens have no meaning; other rows read and write nothing.
    """
    kernel = Kernel.of(q, states, is_decode=False)
    tokens = q, k, v, decay, rate
    rows = starts[:-1], starts[1:], jnp.full((1,), states.layer, jnp.int32), states.reads, states.writes
    places = _Places(*whole)
    # XLA would pass the address of a part of another array, and Mosaic refuses addresses that are not aligned.
    tokens, rows, chunks, places = jax.lax.optimization_barrier((tokens, rows, chunks, places))
    pool: Any = states.pool if states.writes is None else jax.new_ref(states.pool)
    operands, structure = jax.tree.flatten((Refs(*tokens, *rows, pool), chunks, places))

    def body(*refs: Any, handover: Any) -> None:
        own, factors, chunk_places = jax.tree.unflatten(structure, refs[:-1])
        _body(kernel, own._replace(out=refs[-1]), factors, chunk_places, handover)

    launch = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(v.shape, jnp.float32),
        grid=(kernel.num_programs(len(states.reads)),),
        grid_names=("program",),
        scratch_types={"handover": plgpu.SMEM((kernel.key_dim, COLUMNS), jnp.float32)},
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=mgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,  # a thread reads nothing that another one writes, except at the handovers
        ),
    )
    out = launch(*operands)
    return out, pool if states.writes is None else jax.freeze(pool)


def _body(kernel: Kernel, refs: Refs, chunks: Chunks, places: _Places, handover: Any) -> None:
    place = place_of(kernel, refs)
    row = place.row
    count = places.counts[row]

    @pl.when(count > 0)
    def _() -> None:
        first = places.firsts[row]
        border = places.starts[first]

        def after(state: Array) -> Array:
            state = after_tokens(kernel, refs, place, state, refs.starts[row], border)
            put(handover, state)
            _wait_for_threads()
            sums = tuple(load_sum(handover.at[pl.ds(i, BLOCK)]) for i in range(0, kernel.key_dim, BLOCK))
            sums = _after_chunks(refs, chunks, place, sums, first, count, border)
            _wait_for_threads()
            for i, total in enumerate(sums):
                put(handover.at[pl.ds(i * BLOCK, BLOCK)], columns_last(total))
            _wait_for_threads()
            state = load(handover, kernel.layout)
            return after_tokens(kernel, refs, place, state, border + count * CHUNK, refs.ends[row])

        update(kernel, refs, place, after)


def _wait_for_threads() -> None:
    """Wait until all threads have come here. (Pallas' own wait has an instruction that GPUs before Hopper do not have.)"""

    @plgpu.inline_mgpu()  # type: ignore[untyped-decorator]
    def wait(_: Any) -> None:
        mgpu.utils.warpgroup_barrier()

    wait()


def _after_chunks(
    refs: Refs, chunks: Chunks, place: Place, state: tuple[Array, ...], first: Any, count: Any, border: Any
) -> tuple[Array, ...]:
    """Return the state after chunks first ... first + count - 1, whose tokens begin at `border`. Blocks [C, BLOCK] of it."""

    def one(index: Any, state: tuple[Array, ...]) -> tuple[Array, ...]:
        tokens = pl.ds(border + index * CHUNK, CHUNK)
        return _after_chunk(refs, chunks, place, state, first + index, tokens)

    found: tuple[Array, ...] = jax.lax.fori_loop(0, count, one, state)
    return found


def _after_chunk(
    refs: Refs, chunks: Chunks, place: Place, state: tuple[Array, ...], chunk: Any, tokens: Any
) -> tuple[Array, ...]:
    """Return the state after a chunk, and write the outputs of its tokens. See `chunk.Chunk`."""
    of_head, of_key = (chunk, place.head), (chunk, place.key_head)
    from_start = _decays(chunks.from_start.at[of_head])
    added = load_sum(refs.v.at[tokens, place.head, place.columns])
    known, read = _found(state, chunks.keys.at[of_key], chunks.queries.at[of_key], has_rate=chunks.solution is not None)
    if chunks.solution is not None:
        added = add_matmul(empty(), as_left(added - from_start * known), load_block(chunks.solution.at[of_head]))
    read = add_matmul(from_start * read, as_left(added), load_block(chunks.scores.at[of_head]))
    put(refs.out.at[tokens, place.head, place.columns], columns_last(read))
    kept = as_left(added * _decays(chunks.kept.at[of_head]))
    total = chunks.from_start[(*of_head, CHUNK - 1)]
    back = chunks.keys_back.at[of_key]
    return tuple(add_matmul(block * total, kept, load_block(back.at[i])) for i, block in enumerate(state))


def _found(state: tuple[Array, ...], keys: Any, queries: Any, *, has_rate: bool) -> tuple[Array, Array]:
    """Return what keys and queries find in a state; of keys nothing without rates."""
    known, read = empty(), empty()
    for i, block in enumerate(state):
        left = as_left(block)
        if has_rate:
            known = add_matmul(known, left, load_block(keys.at[i]))
        read = add_matmul(read, left, load_block(queries.at[i]))
    return known, read


def _decays(ref: Any) -> Array:
    """Return the decays of a chunk's tokens for each column."""
    return jax.lax.broadcast_in_dim(load(ref, SUM.reduce(0)), (COLUMNS, CHUNK), (1,))
