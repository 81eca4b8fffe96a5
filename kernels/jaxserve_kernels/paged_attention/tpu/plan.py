"""Sizes of the TPU kernels: from data per kind of chip, halved until they fit into its VMEM."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve_kernels.paged_attention import tuning
from jaxserve_kernels.paged_attention.tpu.stream import IDS_PER_LINE

LANES = 128
SUBLANES = 8
_TOKENS_PER_TILE = 16
"""Tiles are multiples: rows of queries of two bytes come in packed tiles of 16."""
_USABLE_VMEM = 0.75
"""Bytes of a core's VMEM that kernels may use: the rest is for the compiler, and for arrays XLA keeps there between kernels."""
_SCOPED_VMEM_BYTES = 16 << 20
"""Bytes that the compiler grants a kernel that asks for nothing."""


_MOST_UNROLLED_SCORES = 1 << 18
"""Scores of all heads of a block that is computed without a loop over heads."""
_MOST_TILE_SLOTS = 32
"""Slots of a packed tile of 8-bit numbers; those of wider numbers have fewer."""


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """The tunable numbers, one file `tuning/<chip>.json` for each kind of chip."""

    decode_block_bytes: int
    """Bytes of keys in flight for a decoding row; as many of values, and both twice."""
    chunk_block_keys: int
    chunk_tile_tokens: int


@dataclass(frozen=True, slots=True)
class Chip:
    """The properties of a core that the kernels need, and the number of cores in one device."""

    sizes: BlockSizes
    num_cores: int
    vmem_bytes: int


@dataclass(frozen=True, slots=True)
class Shape:
    """The shapes of one device's share of the problem."""

    num_heads: int
    kv_heads: int
    head_dim: int  # of the pool: a multiple of the lanes
    page_size: int
    max_pages: int
    kv_bytes: int  # of an element
    query_bytes: int

    @property
    def group(self) -> int:
        return self.num_heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Plan:
    """The static parameters of the attention kernel."""

    tokens_per_tile: int
    rows_per_token: int
    pages_per_block: int
    head_splits: int
    """Programs that share the kv heads: one for each core."""

    def vmem_bytes(self, shape: Shape) -> int:
        """Return the bytes of the kernel's buffers, and of the values in flight: of one head, or of two that overlap."""
        heads, rows = shape.kv_heads // self.head_splits, self.tokens_per_tile * self.rows_per_token
        keys = self.pages_per_block * shape.page_size
        page = heads * shape.page_size * shape.head_dim * shape.kv_bytes
        tile = heads * rows * shape.head_dim
        blocks = 2 * 2 * self.pages_per_block * page + 2 * page // shape.page_size * _MOST_TILE_SLOTS
        queries = tile * (2 * 2 * shape.query_bytes + 4) + heads * rows * (2 * LANES + 2 * SUBLANES) * 4
        on_the_way = 4 * (4 * rows * keys + 2 * keys * shape.head_dim + 2 * rows * shape.head_dim)
        return blocks + queries + on_the_way * min(2, heads_at_once(heads, rows, keys))

    def vmem_limit_bytes(self, shape: Shape, chip: Chip) -> int:
        """Return the bytes that the compiler may give the kernel."""
        return _limit_bytes(self.vmem_bytes(shape), chip)

    def cost(self, shape: Shape, num_tiles: int) -> pl.CostEstimate:
        """For XLA's scheduler, which cannot know the lengths: rows of half the longest."""
        keys = num_tiles * shape.max_pages * shape.page_size // 2 * shape.kv_heads
        scores = keys * self.tokens_per_tile * shape.group
        return pl.CostEstimate(
            flops=4 * scores * shape.head_dim,
            bytes_accessed=2 * keys * shape.head_dim * shape.kv_bytes,
            transcendentals=scores,
        )


@dataclass(frozen=True, slots=True)
class WritePlan:
    """The static parameters of the kernel that writes whole pages."""

    head_splits: int
    """Programs that write a page, each some of its kv heads."""

    def vmem_bytes(self, shape: Shape) -> int:
        """Return the bytes of the kernel's blocks, all of them twice, and of the values in flight: two pages of float32, and again
        rolled, of keys and of values."""
        numbers = shape.kv_heads // self.head_splits * shape.page_size * shape.head_dim
        new_bytes = max(shape.kv_bytes, 2)  # see `write._in_tiles`
        return numbers * (2 * (4 * new_bytes + 4 * shape.kv_bytes) + 2 * 2 * 2 * 4)

    def vmem_limit_bytes(self, shape: Shape, chip: Chip) -> int:
        """Return the bytes that the compiler may give the kernel."""
        return _limit_bytes(self.vmem_bytes(shape), chip)


def decode_plan(shape: Shape, chip: Chip) -> Plan:
    """One token a tile; its query heads of one kv head are padded to whole sublanes."""
    splits = _head_splits(shape, chip)
    page = shape.kv_heads // splits * shape.page_size * shape.head_dim * shape.kv_bytes
    pages = _pages_per_block(chip.sizes.decode_block_bytes // page, shape)
    return _fitting(Plan(1, round_up(shape.group, SUBLANES), pages, splits), shape, chip)


def chunk_plan(shape: Shape, chip: Chip, num_tokens: int) -> Plan:
    """Tiles of many tokens, their query heads of one kv head without gaps."""
    tokens = min(chip.sizes.chunk_tile_tokens, round_up(num_tokens, _TOKENS_PER_TILE))
    pages = _pages_per_block(chip.sizes.chunk_block_keys // shape.page_size, shape)
    return _fitting(Plan(tokens, shape.group, pages, _head_splits(shape, chip)), shape, chip)


def write_plan(shape: Shape, chip: Chip) -> WritePlan:
    """Return the plan that writes as many heads at once as fit."""
    plan = WritePlan(_head_splits(shape, chip))
    while plan.vmem_bytes(shape) > _budget(chip) and shape.kv_heads % (2 * plan.head_splits) == 0:
        plan = WritePlan(2 * plan.head_splits)
    return plan


def this_chip() -> Chip:
    """The device that is compiled for: of the mesh in context, or the default one. An interpreter plays a v5e."""
    if not pltpu.is_tpu_device():
        return Chip(_sizes("v5e"), 1, _SCOPED_VMEM_BYTES)
    info = pltpu.get_tpu_info()
    return Chip(_sizes(str(info.chip_version)), info.num_cores, info.vmem_capacity_bytes)


def heads_at_once(heads: int, rows: int, keys: int) -> int:
    """Return the heads of a block that are computed in a straight line, in which one head's softmax overlaps another's matmuls.

    All of a small block; of a large one two, whose values fit into VMEM together.
    """
    if heads * rows * keys <= _MOST_UNROLLED_SCORES:
        return heads
    return 2 if heads % 2 == 0 else 1


def slots_per_tile(dtype: jnp.dtype, page_size: int) -> int:
    """Return the slots of a page that are copied at once: a packed tile of the type, or the largest part of it that divides pages."""
    return math.gcd(page_size, _MOST_TILE_SLOTS // dtype.itemsize)


def round_up(count: int, multiple: int) -> int:
    """The next multiple."""
    return -(-count // multiple) * multiple


def compute_dtype(pool_dtype: jnp.dtype) -> jnp.dtype:
    """Return the type of the matmuls' operands: float32 for float32, bfloat16 for everything else, which it holds exactly."""
    computed: jnp.dtype = jnp.dtype("float32" if pool_dtype == jnp.float32 else "bfloat16")
    return computed


def _head_splits(shape: Shape, chip: Chip) -> int:
    return chip.num_cores if shape.kv_heads % chip.num_cores == 0 else 1


def _pages_per_block(wanted: int, shape: Shape) -> int:
    """A power of two, so that a line of the page table holds whole blocks."""
    most = min(wanted, 1 << (shape.max_pages - 1).bit_length(), IDS_PER_LINE)
    return 1 << (max(most, 1).bit_length() - 1)


def _budget(chip: Chip) -> int:
    return int(chip.vmem_bytes * _USABLE_VMEM)


def _limit_bytes(wanted: int, chip: Chip) -> int:
    """Return a limit with room for what the compiler adds to the bytes that a plan knows of."""
    return min(chip.vmem_bytes, max(_SCOPED_VMEM_BYTES, wanted * 3 // 2))


def _fitting(plan: Plan, shape: Shape, chip: Chip) -> Plan:
    budget = _budget(chip)
    while plan.vmem_bytes(shape) > budget and plan.pages_per_block > 1:
        plan = replace(plan, pages_per_block=plan.pages_per_block // 2)
    while plan.vmem_bytes(shape) > budget and plan.tokens_per_tile > _TOKENS_PER_TILE:
        plan = replace(plan, tokens_per_tile=round_up(plan.tokens_per_tile // 2, _TOKENS_PER_TILE))
    return plan


def _sizes(chip: str) -> BlockSizes:
    return BlockSizes(**tuning.load(f"tpu_{chip}"))
