"""Matmuls of few tokens with GGUF blocks for Hopper: tiles are read once, as `block_kinds` lays them out, and upcast in registers.

As in `matmul.gpu.skinny`, outputs are the rows of the tensor cores' matmuls, and programs share the tiles as `stream` says. See `steps`.

Letters: T tokens, I inputs, O outputs, G groups of inputs, R tiles of 16 outputs, B blocks, Y bytes, L lines of bytes.
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
from jaxserve_kernels.block_matmul.gpu.steps import LINE, Steps
from jaxserve_kernels.matmul.gpu.stream import Stream
from jaxserve_kernels.matmul.tuning import SkinnyTuning

_TOKENS = 8
"""Columns of a matmul come in eights."""


@dataclass(frozen=True, slots=True)
class _Kernel:
    """Compile-time parameters of one launch."""

    stream: Stream
    steps: Steps


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
    steps = Steps(kind, tuning.tile, len(padded), is_emulated)
    by_group, *sums = steps.operands(padded)
    parts = _launch(_Kernel(stream, steps), by_group, tiles.reshape(len(tiles), -1, LINE), *sums)
    return stream.joined(parts)[:num_tokens]


def _launch(kernel: _Kernel, x: Float[Array, "G T _"], tiles: UInt8[Array, "R L 32"], *sums: Array) -> Array:
    """Return the parts of the result. sums: those of each group's activations, float32 [G, T], if the type needs them."""
    stream, steps, tuned = kernel.stream, kernel.steps, kernel.stream.tuning
    scratch = steps.scratch(tuned.stages, tuned.workers, x.dtype) | {
        "ready": plgpu.Barrier(num_arrivals=steps.num_copies, num_barriers=tuned.stages),
        "free": plgpu.Barrier(num_arrivals=tuned.workers, num_barriers=tuned.stages),
    }

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
    count, lines, num_groups = kernel.stream.tuning.block // TILE, kernel.steps.lines, kernel.steps.groups
    groups, ready = pl.ds(step * num_groups, num_groups), scratch["ready"].at[slot]
    own = tiles.at[pl.ds(block * count, count), pl.ds(step * lines, lines)]
    plgpu.copy_gmem_to_smem(own, scratch["w_ring"].at[slot], ready)
    plgpu.copy_gmem_to_smem(x.at[groups], scratch["x_ring"].at[slot], ready)
    for each in sums:
        plgpu.copy_gmem_to_smem(each.at[groups], scratch["s_ring"].at[slot], ready)


def _multiply(kernel: _Kernel, worker: Any, start: Any, stop: Any, scratch: dict[str, Any]) -> Array:
    """Return a worker's matmul of the steps [start, stop) of its outputs."""
    stream = kernel.stream

    def add_step(tile: Any, total: Array) -> Array:
        slot = stream.slot_of(tile)
        plgpu.barrier_wait(scratch["ready"].at[slot])
        total = kernel.steps.add(scratch, slot, worker, total)
        plgpu.barrier_arrive(scratch["free"].at[slot])
        return total

    zeros = plgpu.layout_cast(jnp.zeros((stream.tuning.rows, stream.num_tokens), jnp.float32), plgpu.Layout.WGMMA)
    total: Array = jax.lax.fori_loop(start, stop, add_step, zeros)
    return total
