"""Matmuls of few tokens with GGUF blocks for Hopper: tiles are read once, as `block_kinds` lays them out, and upcast in registers.

As in `matmul.gpu.skinny`, outputs are the rows of the tensor cores' matmuls, and programs share the tiles as `stream` says. The 16
outputs of a tile are those of a warp. Codes less their zero are exact in bfloat16. The sums of a group, the inputs that share a scale,
are multiplied with it in float32 before they are added, so weights are those of the file, not rounded. What a type subtracts from
all weights of a group is multiplied with the sum of the group's activations.

Letters: T tokens, I inputs, O outputs, G groups of inputs, R tiles of 16 outputs, B blocks, Y bytes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from jaxserve_kernels.block_kinds import TILE, BlockKind
from jaxserve_kernels.block_matmul.gpu import upcast
from jaxserve_kernels.block_matmul.reference import scaled_codes
from jaxserve_kernels.hopper import stored, tiled
from jaxserve_kernels.matmul.gpu.stream import Stream
from jaxserve_kernels.matmul.tuning import SkinnyTuning

_TOKENS = 8
"""Columns of a matmul come in eights."""
_LINE = 32
"""Bytes of the innermost dimension of copies: all types' steps are multiples of it."""
_REGISTERS = 48
"""Registers of a thread for codes and sums of the groups that are multiplied at the same time."""


@dataclass(frozen=True, slots=True)
class _Kernel:
    """Static facts of one launch."""

    stream: Stream
    kind: BlockKind
    is_emulated: bool
    """True if the interpreter runs it."""

    @property
    def group(self) -> int:
        """Inputs of a group."""
        return upcast.group_of(self.kind)

    @property
    def groups(self) -> int:
        """Groups of a step."""
        return self.stream.tuning.tile // self.group

    @property
    def step_bytes(self) -> int:
        """Bytes of a step of one tile."""
        return self.stream.tuning.tile // self.kind.num_inputs * self.kind.tile_bytes

    @property
    def at_once(self) -> int:
        """Groups that are multiplied at the same time: a power of two."""
        if self.is_emulated:
            return 1
        most = _REGISTERS // (self.group // 4 + self.stream.num_tokens // 2)
        return 1 << (max(1, min(self.groups, most)).bit_length() - 1)


@functools.partial(jax.jit, static_argnames=("kind", "tuning", "is_emulated"))
def block_matmul(
    x: Float[Array, "T I"],
    tiles: UInt8[Array, "R B Y"],
    *,
    kind: BlockKind,
    tuning: SkinnyTuning,
    is_emulated: bool = False,
) -> Float[Array, "T O"]:
    """See `api.block_matmul`; shapes: see `gpu.choice`."""
    num_tokens, num_inputs = x.shape
    padded = jnp.pad(x, ((0, -num_tokens % _TOKENS), (0, 0)))
    stream = Stream(len(padded), TILE * len(tiles), num_inputs // tuning.tile, tuning)
    kernel = _Kernel(stream, kind, is_emulated)
    by_group = padded.reshape(len(padded), -1, kernel.group).swapaxes(0, 1)  # (G, T, inputs)
    operands = [by_group if is_emulated else upcast.permuted(by_group, kind), tiles.reshape(len(tiles), -1, _LINE)]
    if kind.has_minimum:
        operands.append(by_group.astype(jnp.float32).sum(-1))
    return stream.joined(_launch(kernel, *operands))[:num_tokens]


def _launch(kernel: _Kernel, x: Float[Array, "G T _"], tiles: UInt8[Array, "R L 32"], *sums: Array) -> Array:
    """Return the parts of the result. sums: those of each group's activations, float32 [G, T], if the type needs them."""
    stream, tuned = kernel.stream, kernel.stream.tuning
    scratch = {
        "x_ring": tiled((tuned.stages, kernel.groups, stream.num_tokens, kernel.group), x.dtype),
        "w_ring": plgpu.SMEM((tuned.stages, tuned.block // TILE, kernel.step_bytes // _LINE, _LINE), jnp.uint8),
        "ready": plgpu.Barrier(num_arrivals=2 + len(sums), num_barriers=tuned.stages),
        "free": plgpu.Barrier(num_arrivals=tuned.workers, num_barriers=tuned.stages),
    }
    if sums:
        scratch["s_ring"] = plgpu.SMEM((tuned.stages, kernel.groups, stream.num_tokens), jnp.float32)
    if kernel.is_emulated:
        scratch["wide"] = tiled((tuned.workers, tuned.rows, kernel.group), x.dtype)

    def body(*refs: Any, **scratch: Any) -> None:
        *operands, out = refs
        stream.run(
            out,
            scratch["free"],
            lambda worker, start, stop: _multiply(kernel, worker, start, stop, scratch),
            lambda block, step, slot: _copy(kernel, operands, scratch, block, step, slot),
        )

    return stream.launch(body, (x, tiles, *sums), scratch, jnp.float32)


def _copy(kernel: _Kernel, operands: list[Any], scratch: dict[str, Any], block: Any, step: Any, slot: Any) -> None:
    """Start the copies of a step's tiles and activations."""
    x, tiles, *sums = operands
    count, lines = kernel.stream.tuning.block // TILE, kernel.step_bytes // _LINE
    groups, ready = pl.ds(step * kernel.groups, kernel.groups), scratch["ready"].at[slot]
    own = tiles.at[pl.ds(block * count, count), pl.ds(step * lines, lines)]
    plgpu.copy_gmem_to_smem(own, scratch["w_ring"].at[slot], ready)
    plgpu.copy_gmem_to_smem(x.at[groups], scratch["x_ring"].at[slot], ready)
    for each in sums:
        plgpu.copy_gmem_to_smem(each.at[groups], scratch["s_ring"].at[slot], ready)


def _multiply(kernel: _Kernel, worker: Any, start: Any, stop: Any, scratch: dict[str, Any]) -> Array:
    """Return a worker's product of the steps [start, stop) of its outputs."""
    stream, tuned = kernel.stream, kernel.stream.tuning
    shape, count = (tuned.rows, stream.num_tokens), tuned.rows // TILE

    def operands_of(slot: Any, groups: range) -> tuple[list[Any], list[Array], list[Array]]:
        """Return codes, scales, and what is subtracted, of some groups of a step."""
        tile = scratch["w_ring"].at[slot, pl.ds(worker * count, count)]
        if kernel.is_emulated:
            (group,), weights = groups, scaled_codes(kernel.kind, tile[...].reshape(count, -1, kernel.kind.tile_bytes))
            own = weights.codes[:, group * kernel.group : (group + 1) * kernel.group].astype(jnp.bfloat16)
            offsets = [] if weights.offsets is None else [weights.offsets[:, group]]
            return [stored(own, scratch["wide"].at[worker])], [weights.steps[:, group]], offsets
        wide, steps, offsets = upcast.upcast(tile, kernel.kind, groups)
        parts = [wide[:, i * kernel.group : (i + 1) * kernel.group] for i in range(len(groups))]
        return parts, steps, offsets

    def add_groups(slot: Any, groups: range, total: Array) -> Array:
        parts, steps, offsets = operands_of(slot, groups)

        def multiply(*accumulators: Any) -> list[Array]:
            for group, accumulator, part in zip(groups, accumulators, parts, strict=True):
                plgpu.wgmma(accumulator, part, scratch["x_ring"].at[slot, group].transpose((1, 0)))
            plgpu.wgmma_wait(0)
            return [accumulator[...] for accumulator in accumulators]

        products = pl.run_scoped(multiply, *[plgpu.ACC(shape, jnp.float32)] * len(groups))
        for product, scales in zip(products, steps, strict=True):
            total = total + product * jax.lax.broadcast_in_dim(scales, shape, (0,))
        for group, each in zip(groups, offsets, strict=False):  # or there are none
            sums = plgpu.load(scratch["s_ring"].at[slot, group], layout=plgpu.Layout.WGMMA.reduce(0))
            own = jax.lax.broadcast_in_dim(each, shape, (0,))
            total = total - own * jax.lax.broadcast_in_dim(sums, shape, (1,))
        return total

    def add_step(tile: Any, total: Array) -> Array:
        slot = stream.slot_of(tile)
        plgpu.barrier_wait(scratch["ready"].at[slot])
        for first in range(0, kernel.groups, kernel.at_once):
            total = add_groups(slot, range(first, first + kernel.at_once), total)
        plgpu.barrier_arrive(scratch["free"].at[slot])
        return total

    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
    total: Array = jax.lax.fori_loop(start, stop, add_step, zeros)
    return total
