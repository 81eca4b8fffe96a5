"""Attention of query segments for Blackwell data centre GPUs (compute capability 10.x), on `tcgen05.mma`.

FlashAttention-4's shape over pages: a program takes tiles of 128 queries of two heads that share their keys. One warp
fetches, one issues all matmuls, and a warpgroup for each head does its softmax. Scores, weights and sums stay in tensor
memory. The grid is persistent and takes the tiles with the most keys first. Sums are scaled only when a row's maximum has
grown by more than a factor of 256.

Letters: T tokens, B rows, N query heads, K kv heads, H head dim, S slots per page, M pages per row, Q tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from jaxserve_kernels.paged_attention.gpu import tiles
from jaxserve_kernels.paged_attention.gpu.tiles import MASKED, PageReader
from jaxserve_kernels.paged_attention.layout import Ragged
from jaxserve_kernels.paged_attention.options import Scoring
from jaxserve_kernels.paged_attention.tuning import PrefillTuning

QUERIES_PER_TILE = 128
"""Rows of a matmul, and of tensor memory: a thread of a warpgroup has one."""
ALIGNMENT = 8
"""Alignment of a tile's first token: shared memory is laid out in tiles of 8 rows."""
_WORKERS, _WARPS = 2, 4
"""Warpgroups of softmax, and warps of each."""
_KEYS = 128
"""Keys of a tile, and columns of a head's scores."""
_PIECE = 64
"""Columns of a result on their way out: whole 128-byte lines."""
_SCALED = 32
"""Columns of sums that are scaled at a time."""
_GROWTH = 8.0
"""Binary digits by which a maximum may grow before sums are scaled: weights are below 2 ** 8, which float16 holds as well."""
_FETCHER, _MULTIPLIER = 0, 1
"""Warps of the third warpgroup."""
_REGISTERS = (216, 72)
"""Registers of a thread of softmax, and of the third warpgroup: 2 x 128 x 216 + 128 x 72 are below the 65,536 there are."""
_SCRATCH_BYTES = 16
"""Shared memory for reductions of Mosaic GPU over warps: there are none, and shared memory is full."""
_LAYOUT = plgpu.Layout.TCGEN05_TMEM_NATIVE


class _Unit(NamedTuple):
    """A tile of queries of one or two heads, and the key tiles [first, last) that any of its queries sees."""

    head: Any
    num_heads: Any
    row: Any
    token: Any
    """First token of the tile."""
    begin: Any
    end: Any
    """The row's own tokens in the tile: [begin, end)."""
    offset: Any
    """Position of a token minus its place on the token axis."""
    first: Any
    last: Any


@dataclass(frozen=True, slots=True)
class _Kernel:
    """Compile-time parameters of one launch."""

    num_heads: int
    num_kv_heads: int
    dim: int
    max_pages: int
    reader: PageReader
    scoring: Scoring
    tuning: PrefillTuning
    has_sinks: bool
    is_emulated: bool

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def pairs(self) -> int:
        """Pairs of the heads of a group; the last one is a single head if they are odd."""
        return -(-self.group // _WORKERS)

    def rounds(self, program: Any, refs: tiles.SegmentRefs) -> Any:
        """Units that a program does."""
        units = refs.num_tiles[0] * (self.num_kv_heads * self.pairs)
        return jax.lax.div(units - program + (self.tuning.programs - 1), jnp.int32(self.tuning.programs))

    def unit(self, program: Any, turn: Any, refs: tiles.SegmentRefs) -> _Unit:
        """Heads first, so that those which share keys run side by side; the last tiles, with most keys, first."""
        index, heads = turn * self.tuning.programs + program, jnp.int32(self.num_kv_heads * self.pairs)
        tile = refs.num_tiles[0] - 1 - jax.lax.div(index, heads)
        place = jax.lax.rem(index, heads)
        kv_head, pair = jax.lax.div(place, jnp.int32(self.pairs)), jax.lax.rem(place, jnp.int32(self.pairs))
        row, token = refs.tile_rows[tile], refs.tile_starts[tile]
        row_end = refs.query_starts[row + 1]
        begin = jnp.maximum(token, refs.query_starts[row])
        end = jnp.minimum(token + QUERIES_PER_TILE, row_end)
        offset = refs.lengths[row] - row_end
        first = jax.lax.div(tiles.lowest_key(self.scoring, begin + offset), jnp.int32(_KEYS))
        last = jax.lax.div(end + offset + (_KEYS - 1), jnp.int32(_KEYS))
        last = jnp.maximum(last, first + 1)  # a row without keys sees none of the null page's
        head = kv_head * self.group + pair * _WORKERS
        num_heads = jnp.minimum(self.group - pair * _WORKERS, _WORKERS)
        return _Unit(head, num_heads, row, token, begin, end, offset, first, last)


def prefill(
    q: Float[Array, "T N H"],
    k_pages: Num[Array, "L P K S H"],
    v_pages: Num[Array, "L P K S H"],
    layer: Int[Array, ""],
    block_tables: Int[Array, "B M"],
    kv_lengths: Int[Array, "B"],
    ragged: Ragged,
    *,
    scoring: Scoring,
    sinks: Float[Array, "N"] | None,
    tuning: PrefillTuning,
    is_emulated: bool = False,
) -> Float[Array, "T N H"]:
    """Attention of the tokens that `ragged`'s tiles cover; the others' results are what the memory held."""
    num_tokens, num_heads, dim = q.shape
    num_pages, num_kv_heads, page_size = k_pages.shape[1:4]
    kernel = _Kernel(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        dim=dim,
        max_pages=block_tables.shape[1],
        reader=PageReader(num_pages, num_kv_heads, page_size, _KEYS, is_by_warp=True),
        scoring=scoring,
        tuning=tuning,
        has_sinks=sinks is not None,
        is_emulated=is_emulated,
    )
    # Bulk copies take whole tiles of the memory's rows, and the last tile of queries may end there.
    tail = -num_tokens % ALIGNMENT + QUERIES_PER_TILE
    padded = jnp.pad(q.reshape(num_tokens, num_heads * dim), ((0, tail), (0, 0)))
    launch = plgpu.kernel(
        lambda *refs, **scratch: _body(kernel, tiles.SegmentRefs(*refs), scratch),
        out_type=jax.ShapeDtypeStruct((num_tokens, num_heads * dim), q.dtype),
        grid=(tuning.programs,),
        grid_names=("program",),
        num_threads=_WORKERS + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(kernel, q.dtype),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=_SCRATCH_BYTES,
        ),
    )
    out = launch(
        padded,
        k_pages.reshape(-1, dim),
        v_pages.reshape(-1, dim),
        *tiles.whole(layer.reshape(1), block_tables, kv_lengths, ragged.query_starts),
        *tiles.whole(ragged.tile_rows, ragged.tile_starts, ragged.num_tiles.reshape(1)),
        jnp.zeros(num_heads) if sinks is None else sinks.astype(jnp.float32),
    )
    return out.reshape(num_tokens, num_heads, dim)


def _scratch(kernel: _Kernel, dtype: Any) -> dict[str, Any]:
    stages, dim = kernel.tuning.stages, kernel.dim
    filled = plgpu.Barrier(num_arrivals=kernel.reader.copies, num_barriers=stages)
    multiplied = plgpu.Barrier(num_barriers=stages, orders_tensor_core=True)
    of_workers = plgpu.Barrier(num_barriers=_WORKERS, orders_tensor_core=True)
    # Weights take the place of the first half of their scores. The interpreter cannot tell both heads' apart.
    scores = (
        plgpu.TMEM((QUERIES_PER_TILE, _WORKERS * _KEYS), jnp.float32),
        plgpu.TMEM((QUERIES_PER_TILE, 2 * _WORKERS * _KEYS), dtype, packed=True),
    )
    return {
        "q_tile": tiles.tiled((_WORKERS, QUERIES_PER_TILE, dim), dtype),
        "k_ring": tiles.tiled((stages, _KEYS, dim), dtype),
        "v_ring": tiles.tiled((stages, _KEYS, dim), dtype),
        "piece": plgpu.SMEM((_WORKERS, QUERIES_PER_TILE, _PIECE), dtype),
        "votes": plgpu.SMEM((_WORKERS, _WARPS), jnp.float32),
        "scores": scores if kernel.is_emulated else plgpu.RefUnion(*scores),
        "sums": plgpu.TMEM((QUERIES_PER_TILE, _WORKERS * dim), jnp.float32),
        "q_ready": plgpu.Barrier(num_barriers=_WORKERS),
        "q_free": plgpu.Barrier(orders_tensor_core=True),
        "k_ready": filled,
        "v_ready": filled,
        "k_free": multiplied,
        "v_free": multiplied,
        "scored": of_workers,
        "weighted": of_workers,
        "added": of_workers,
        "finished": of_workers,
    }


def _body(kernel: _Kernel, refs: tiles.SegmentRefs, scratch: dict[str, Any]) -> None:
    warpgroup, program = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("program")

    def for_each_unit(work: Any) -> Any:
        """Call `work(unit, done)` with the number of key tiles of the units before; gives that of all."""

        def one(turn: Any, done: Any) -> Any:
            unit = kernel.unit(program, turn, refs)
            work(unit, done)
            return done + (unit.last - unit.first)

        return jax.lax.fori_loop(0, kernel.rounds(program, refs), one, jnp.int32(0))

    @pl.when(warpgroup < _WORKERS)
    def _() -> None:
        plgpu.set_max_registers(_REGISTERS[0], action="increase")

        def work(unit: _Unit, done: Any) -> None:
            pl.when(warpgroup < unit.num_heads)(lambda: _soften(kernel, refs, scratch, warpgroup, unit))

        for_each_unit(work)

    @pl.when(warpgroup == _WORKERS)
    def _() -> None:
        plgpu.set_max_registers(_REGISTERS[1], action="decrease")

        @plgpu.warp_map
        def _(warp: Any) -> None:
            @pl.when(warp == _FETCHER)
            def _() -> None:
                done = for_each_unit(lambda unit, done: _fetch(kernel, refs, scratch, unit, done))
                _drain(kernel, scratch, done)

            @pl.when(warp == _MULTIPLIER)
            def _() -> None:
                for_each_unit(lambda unit, done: _multiply(kernel, scratch, unit, done))


def _columns(worker: Any, width: int) -> Any:
    return pl.ds(worker * width, width)


def _multiply(kernel: _Kernel, scratch: dict[str, Any], unit: _Unit, done: Any) -> None:
    """Issue the matmuls of a unit: both heads' scores of a key tile, each after the sums of its head's tile before."""
    scores, weights = scratch["scores"]

    def step(i: Any, _: None) -> None:
        taken = done + i - unit.first
        slot = jax.lax.rem(taken, jnp.int32(kernel.tuning.stages))
        before = jax.lax.rem(taken + kernel.tuning.stages - 1, jnp.int32(kernel.tuning.stages))

        def one(worker: Any, _: None) -> None:
            @pl.when(i > unit.first)
            def add() -> None:
                pl.when(worker == 0)(lambda: plgpu.barrier_wait(scratch["v_ready"].at[before]))
                plgpu.barrier_wait(scratch["weighted"].at[worker])
                plgpu.tcgen05_mma(
                    scratch["sums"].at[:, _columns(worker, kernel.dim)],
                    weights.at[:, _columns(2 * worker, _KEYS)],
                    scratch["v_ring"].at[before],
                    scratch["added"].at[worker],
                    accumulate=i - 1 > unit.first,
                )

            @pl.when(i < unit.last)
            def score() -> None:
                pl.when(worker == 0)(lambda: plgpu.barrier_wait(scratch["k_ready"].at[slot]))
                pl.when(i == unit.first)(lambda: plgpu.barrier_wait(scratch["q_ready"].at[worker]))
                # The weights lie where the scores go, and a matmul may overtake one into other sums.
                pl.when(i > unit.first)(lambda: plgpu.barrier_wait(scratch["added"].at[worker]))
                plgpu.tcgen05_mma(
                    scores.at[:, _columns(worker, _KEYS)],
                    scratch["q_tile"].at[worker],
                    scratch["k_ring"].at[slot].transpose((1, 0)),
                    scratch["scored"].at[worker],
                    accumulate=False,
                )

        jax.lax.fori_loop(0, unit.num_heads, one, None)
        pl.when(i > unit.first)(lambda: plgpu.tcgen05_commit_arrive(scratch["v_free"].at[before]))
        pl.when(i < unit.last)(lambda: plgpu.tcgen05_commit_arrive(scratch["k_free"].at[slot]))
        pl.when(i == unit.last - 1)(lambda: plgpu.tcgen05_commit_arrive(scratch["q_free"]))

    def finish(worker: Any, _: None) -> None:
        plgpu.barrier_wait(scratch["added"].at[worker])
        plgpu.tcgen05_commit_arrive(scratch["finished"].at[worker])

    jax.lax.fori_loop(unit.first, unit.last + 1, step, None)
    jax.lax.fori_loop(0, unit.num_heads, finish, None)


def _soften(kernel: _Kernel, refs: tiles.SegmentRefs, scratch: dict[str, Any], worker: Any, unit: _Unit) -> None:
    """Turn one head's scores into weights, tile by tile, and write the head's result."""
    scores_of_both, weights_of_both = scratch["scores"]
    scores_of = scores_of_both.at[:, _columns(worker, _KEYS)]
    weights_of = weights_of_both.at[:, _columns(2 * worker, _KEYS)]
    position = unit.token + unit.offset

    def step(i: Any, carry: tuple[Array, Array], *, is_masked: bool) -> tuple[Array, Array]:
        maximum, total = carry
        plgpu.barrier_wait(scratch["scored"].at[worker])
        matmuls = plgpu.async_load_tmem(scores_of, layout=_LAYOUT)
        plgpu.wait_load_tmem()
        scores = tiles.scores(kernel.scoring, matmuls)
        if is_masked:
            scores = jnp.where(_visible(kernel, position - i * _KEYS), scores, MASKED)
        highest = scores.max(axis=1)
        has_grown = highest > maximum + _GROWTH
        new_maximum = jnp.where(has_grown, highest, maximum)
        decay = jnp.exp2(maximum - new_maximum)
        weights = jnp.exp2(scores - tiles.across(new_maximum, _KEYS))
        total = total * decay + weights.sum(axis=1)
        plgpu.async_store_tmem(weights_of, weights.astype(refs.q.dtype))
        most = _largest(kernel, jnp.where(has_grown, 1.0, 0.0), scratch["votes"].at[worker])
        pl.when((most > 0) & (i > unit.first))(lambda: _scale(kernel, scratch, worker, decay))
        plgpu.commit_tmem()
        plgpu.barrier_arrive(scratch["weighted"].at[worker])
        return new_maximum, total

    def masked(i: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        return step(i, carry, is_masked=True)

    def unmasked(i: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        return step(i, carry, is_masked=False)

    # Tiles up to `open_from` and from `open_to` on hold keys that some of the queries must not see.
    newest = position + QUERIES_PER_TILE - 1
    open_to = jnp.clip(jax.lax.div(position + 1, jnp.int32(_KEYS)), unit.first, unit.last)
    open_from = unit.first
    if kernel.scoring.sliding_window is not None:
        lowest = tiles.lowest_key(kernel.scoring, newest) + (_KEYS - 1)
        open_from = jnp.clip(jax.lax.div(lowest, jnp.int32(_KEYS)), unit.first, open_to)
    carry = _row_vector(MASKED), _row_vector(0.0)
    if kernel.scoring.sliding_window is not None:
        carry = jax.lax.fori_loop(unit.first, open_from, masked, carry)
    carry = jax.lax.fori_loop(open_from, open_to, unmasked, carry)
    maximum, total = jax.lax.fori_loop(open_to, unit.last, masked, carry)
    head = unit.head + worker
    if kernel.has_sinks:
        total = total + jnp.exp2(refs.sinks[head] * tiles.LOG2E - maximum)
    plgpu.barrier_wait(scratch["finished"].at[worker])
    has_seen = maximum > MASKED
    _store(kernel, refs, scratch, worker, head, unit, jnp.where(has_seen, 1.0 / total, 0.0))


def _row_vector(value: float) -> Array:
    """One number per query."""
    return plgpu.layout_cast(jnp.full((QUERIES_PER_TILE,), value, jnp.float32), _LAYOUT.reduce(1))


def _largest(kernel: _Kernel, numbers: Array, spare: Any) -> Array:
    """The largest of all queries' numbers, the same in every thread. spare: shared memory for a number of each warp.

    Mosaic GPU's own reductions over warps have one such place for all warpgroups, which would overwrite each other's.
    """
    if kernel.is_emulated:
        return jnp.max(numbers)

    @plgpu.inline_mgpu(
        arg_types=(_LAYOUT.reduce(1), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((), jnp.float32, layout=plgpu.Layout.WG_SPLAT(())),
    )  # type: ignore[untyped-decorator]
    def reduce(_: Any, numbers: Any, spare: Any) -> Any:
        return numbers.reduce("max", 0, spare)

    largest: Array = reduce(numbers, spare)
    return largest


def _visible(kernel: _Kernel, newest: Any) -> Array:
    """True for each key that a query sees. newest: the first query's own key in the tile."""
    shape = (QUERIES_PER_TILE, _KEYS)
    rows = plgpu.broadcasted_iota(jnp.int32, (QUERIES_PER_TILE,), 0, layout=_LAYOUT.reduce(1))
    columns = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_LAYOUT)
    own = tiles.across(rows + newest, _KEYS)
    visible = columns <= own
    if kernel.scoring.sliding_window is not None:
        visible &= columns > own - kernel.scoring.sliding_window
    return visible


def _scale(kernel: _Kernel, scratch: dict[str, Any], worker: Any, decay: Array) -> None:
    """Multiply a head's sums, which no matmul is adding to, by a number per query."""
    for start in range(0, kernel.dim, _SCALED):
        columns = scratch["sums"].at[:, pl.ds(worker * kernel.dim + start, _SCALED)]
        sums = plgpu.async_load_tmem(columns, layout=_LAYOUT)
        plgpu.wait_load_tmem()
        plgpu.async_store_tmem(columns, sums * tiles.across(decay, _SCALED))


def _store(
    kernel: _Kernel,
    refs: tiles.SegmentRefs,
    scratch: dict[str, Any],
    worker: Any,
    head: Any,
    unit: _Unit,
    factor: Array,
) -> None:
    """Write the rows of the unit's own tokens: what is around them belongs to other rows."""
    piece, count = scratch["piece"].at[worker], unit.end - unit.begin
    for start in range(0, kernel.dim, _PIECE):
        columns = scratch["sums"].at[:, pl.ds(worker * kernel.dim + start, _PIECE)]
        sums = plgpu.async_load_tmem(columns, layout=_LAYOUT)
        plgpu.wait_load_tmem()
        tiles.put(piece, (sums * tiles.across(factor, _PIECE)).astype(refs.out.dtype))
        plgpu.commit_smem()
        rows = QUERIES_PER_TILE
        while rows:  # as many rows at a time as the count's binary digits say

            @pl.when((count & rows) != 0)
            def _(rows: int = rows, start: int = start) -> None:
                first = unit.begin + (count & ~(2 * rows - 1))
                source = piece.at[pl.ds(first - unit.token, rows)]
                target = refs.out.at[pl.ds(first, rows), pl.ds(head * kernel.dim + start, _PIECE)]
                plgpu.copy_smem_to_gmem(source, target)

            rows //= 2
        plgpu.wait_smem_to_gmem(0)


def _fetch(kernel: _Kernel, refs: tiles.SegmentRefs, scratch: dict[str, Any], unit: _Unit, done: Any) -> None:
    """Fetch the unit's queries, and fill the ring with its key and value tiles."""
    reader, stages = kernel.reader, kernel.tuning.stages
    layer, kv_head = refs.layer[0], jax.lax.div(unit.head, jnp.int32(kernel.group))
    last_page = jax.lax.div(jnp.maximum(refs.lengths[unit.row] - 1, 0), jnp.int32(reader.page_size))
    last_page = jnp.minimum(last_page, kernel.max_pages - 1)
    pl.when(done > 0)(lambda: plgpu.barrier_wait(scratch["q_free"]))

    def fetch_queries(worker: Any, _: None) -> None:
        source = refs.q.at[pl.ds(unit.token, QUERIES_PER_TILE), _columns(unit.head + worker, kernel.dim)]
        plgpu.copy_gmem_to_smem(source, scratch["q_tile"].at[worker], scratch["q_ready"].at[worker])

    jax.lax.fori_loop(0, unit.num_heads, fetch_queries, None)

    def step(i: Any, pages: tuple[Array, ...]) -> tuple[Array, ...]:
        following = reader.pages(refs.tables, unit.row, i + 1, last_page)  # the copies hide their latency
        taken = done + i - unit.first
        slot = jax.lax.rem(taken, jnp.int32(stages))
        for ring in ("k", "v"):

            @pl.when(taken >= stages)
            def _(ring: str = ring) -> None:
                plgpu.barrier_wait(scratch[f"{ring}_free"].at[slot])

            target, barrier = scratch[f"{ring}_ring"].at[slot], scratch[f"{ring}_ready"].at[slot]
            reader.fetch(getattr(refs, ring), pages, layer, kv_head, i, target, barrier)
        return following

    jax.lax.fori_loop(unit.first, unit.last, step, reader.pages(refs.tables, unit.row, unit.first, last_page))


def _drain(kernel: _Kernel, scratch: dict[str, Any], done: Any) -> None:
    """Wait for every arrival before the barriers go."""
    stages = kernel.tuning.stages

    def one(i: Any, _: None) -> None:
        slot = jax.lax.rem(i, jnp.int32(stages))
        plgpu.barrier_wait(scratch["k_free"].at[slot])
        plgpu.barrier_wait(scratch["v_free"].at[slot])

    jax.lax.fori_loop(jnp.maximum(done - stages, 0), done, one, None)
    pl.when(done > 0)(lambda: plgpu.barrier_wait(scratch["q_free"]))
