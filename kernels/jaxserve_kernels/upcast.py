"""Upcast 8- and 4-bit weights to bfloat16 in words of 32 bits (see `words`), for matmuls on Hopper.

A thread reads consecutive inputs of an output, up to 128 bits at once, and upcasts pairs of numbers that are half a word
apart. The tensor cores take other inputs from each thread, so activations have to be put into the order that results: a sum over inputs
is the same in any order.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array
from jaxtyping import Array, Num

from jaxserve_kernels import mxfp4, words

_LANES = 4
"""Threads that share an output's inputs."""
_LOAD_BITS = 128
"""Most bits that a thread reads at once."""


def is_supported(dtype: Any, weight_dtype: Any) -> bool:
    """Return True if weights can be upcast in words for activations of `dtype`."""
    return dtype == jnp.bfloat16 and weight_dtype in (jnp.int4, jnp.uint8, jnp.int8, jnp.float8_e4m3fn)


def permuted(x: Num[Array, "T I"], weight_dtype: Any, tile: int) -> Num[Array, "T I"]:
    """Return activations with the inputs of each tile in the order of upcast weights; uint8 holds two e2m1 numbers."""
    word = 32 // _bits(weight_dtype)
    parted = x.reshape(len(x), -1, _LANES, tile // _LANES // word, 2, word // 2)
    return parted.transpose(0, 1, 3, 5, 2, 4).reshape(x.shape)


def upcast(tile: Any) -> jax.Array:
    """Return weights in shared memory as bfloat16 in registers, their inputs `permuted`, without the factor of `words`."""
    shape = tile.shape
    layout = _by_words(shape[1], _bits(tile.dtype))

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )  # type: ignore[untyped-decorator]
    def convert(_: Any, packed: Any) -> Any:
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), object)
        for block, half in np.ndindex(shape[0] // 64, 2):  # a thread has two rows of every 64
            loaded = packed.registers[block, 0, 0, 0, half].flat
            own = [pair for register in loaded for pair in words.pairs(register, tile.dtype, jnp.bfloat16)]
            registers[block, :, 0, 0, half, 0, 0, 0, 0] = own
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    load: Any = plgpu.load  # its second argument is required in jax 0.10
    wide: jax.Array = convert(load(tile, layout=layout))
    return wide


def upcast_blocks(tile: Any, scales: Any) -> jax.Array:
    """Return e2m1 weights in shared memory, uint8 `[O, I / 2]`, times the e4m3 scales of their blocks `[G, O]`: see `upcast`."""
    (num_outputs, num_bytes), num_blocks = tile.shape, scales.shape[0]
    shape, words_of_block = (num_outputs, 2 * num_bytes), num_bytes // num_blocks // 4
    layouts = _by_words(num_bytes, 8), _by_blocks(num_blocks)

    @plgpu.inline_mgpu(
        arg_types=layouts,
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )  # type: ignore[untyped-decorator]
    def convert(_: Any, packed: Any, of_blocks: Any) -> Any:
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), object)
        for block, half in np.ndindex(shape[0] // 64, 2):  # a thread has two rows of every 64
            packed_words = [word for each in packed.registers[block, 0, 0, 0, half].flat for word in words.split(each)]
            steps = [words.scale_pair(each) for each in of_blocks.registers[0, block, 0, 0, 0, half].flat]
            own = [
                pair
                for i, word in enumerate(packed_words)
                for pair in words.e2m1_pairs(word, steps[i // words_of_block])
            ]
            registers[block, :, 0, 0, half, 0, 0, 0, 0] = own
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    load: Any = plgpu.load  # its second argument is required in jax 0.10
    wide: jax.Array = convert(load(tile, layout=layouts[0]), load(scales, layout=layouts[1]))
    return wide


def dequantized_blocks(tile: Any, scales: Any, dtype: Any) -> Array:
    """Return e2m1 weights of two numbers a byte times the scales of their blocks `[G, O]`, in order: for the interpreter."""
    numbers = mxfp4.numbers_at(mxfp4.places_of(tile[...]))
    by_output = scales[...].astype(jnp.float32).T
    wide: Array = (numbers.reshape(*by_output.shape, -1) * by_output[:, :, None]).reshape(numbers.shape)
    return wide.astype(dtype)


def _bits(dtype: Any) -> int:
    return 4 if dtype in (jnp.int4, jnp.uint8) else 8


def _by_blocks(num_blocks: int) -> Any:
    """Return the layout of scales `[G, O]` that gives each thread those of its weights in the layout of `_by_words`."""
    own = num_blocks // _LANES
    return plgpu.Layout.TILED(
        fragmented_array.Tiling(((num_blocks, 64), (num_blocks, 16), (num_blocks, 8), (own, 1))),
        warp_dims=(-7,),
        lane_dims=(-3, -4),
        vector_dim=-1,
    )


def _by_words(tile: int, bits: int) -> Any:
    """Return the layout that has rows where the tensor cores have them, each shared by four threads in runs of inputs."""
    run = tile // _LANES
    at_once = min(run, _LOAD_BITS // bits)
    inner = () if at_once == run else ((at_once,),)
    last = -1 - len(inner)
    return plgpu.Layout.TILED(
        fragmented_array.Tiling(((64, tile), (16, tile), (8, tile), (run,), *inner)),
        warp_dims=(last - 6,),
        lane_dims=(last - 2, last - 1),
        vector_dim=-1,
    )
