"""Matmuls with the weights of a layer, one after the other as in a model, by XLA or by our kernel.

A program multiplies with so many different weights that none stays in a cache; every matmul takes the result of the
one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve_kernels.matmul import matmul
from jaxserve_kernels.matmul.gpu import MOST_TOKENS_OF_FOUR, grouped_choice, most_stages
from jaxserve_kernels.matmul.tuning import SkinnyTuning, matmul_types

from benchmarks.gpu.ahead import Wanted
from jaxserve.model_config.decoder import DecoderConfig

GROUP = 128
"""Inputs that share a scale, of 4-bit weights and of e4m3 ones in groups."""
CACHED_BYTES = 256 << 20
"""More than any cache holds."""
MOST_REPEATS = 8
RING_BYTES = 220 << 10
"""Most shared memory for tiles; the compiler refuses what does not fit."""
MOST_STAGES = 8
PROGRAMS = 132

Shapes = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """Matmuls with weights `[out, in]` of these shapes, each taking the result of the one before, or a part of it."""

    shapes: Shapes
    weights: str
    num_tokens: int
    tuning: SkinnyTuning | None = None
    """Tuning of the kernel; None: XLA's matmul."""
    is_dynamic: bool = False
    """True if activations are quantised, too."""
    is_grouped: bool = False
    """True if e4m3 weights have a scale for each group of inputs, as 4-bit weights always have."""

    @property
    def has_scales(self) -> bool:
        return jnp.dtype(self.weights).itemsize == 1

    @property
    def stored(self) -> jnp.dtype:
        """Type of the arrays; 4 bits on CPUs: see `Int4WeightOnly.values_dtype`."""
        return jnp.dtype("int8" if self.weights == "int4" and jax.default_backend() == "cpu" else self.weights)

    @property
    def types(self) -> str:
        """Key of these dtypes in the table of tunings."""
        return matmul_types(self.weights, dynamic=self.is_dynamic) + (" in groups" if self.is_grouped else "")

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        numbers = sum(rows * columns for rows, columns in self.shapes)
        return numbers // 2 if self.weights == "int4" else numbers * jnp.dtype(self.weights).itemsize

    @property
    def flops(self) -> int:
        return 2 * self.num_tokens * sum(rows * columns for rows, columns in self.shapes)

    @property
    def num_repeats(self) -> int:
        return max(1, min(MOST_REPEATS, -(-CACHED_BYTES // self.num_bytes)))

    def wanted(self, dtype: jnp.dtype) -> Wanted:
        """Return the program for activations of `dtype` and the arrays of `Weights`."""
        num_inputs, multiply = self.shapes[0][1], partial(matmul, dynamic=self.is_dynamic)
        if self.tuning is not None:
            multiply = partial(skinny_matmul, self.tuning, is_dynamic=self.is_dynamic)

        def repeat(x: jax.Array, scales: Sequence[jax.Array | None], weights: Sequence[jax.Array]) -> jax.Array:
            for index, weight in enumerate(weights):
                x = multiply(x, weight, scales[index % len(scales)]).astype(dtype)
                if x.shape[1] > num_inputs and (index + 1) % len(scales) == 0:
                    x = jax.lax.optimization_barrier(x)[:, :num_inputs]  # all of it is computed, little is copied
            return x

        x = jax.ShapeDtypeStruct((self.num_tokens, num_inputs), dtype)
        scales = [self._scales(shape, dtype) if self.has_scales else None for shape in self.shapes]
        weights = [jax.ShapeDtypeStruct(shape, self.stored) for shape in self.shapes * self.num_repeats]
        return Wanted(repeat, (x, scales, weights))

    def _scales(self, shape: tuple[int, int], dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
        outputs, inputs = shape
        is_narrow = self.weights == "int4"
        by_group = (inputs // GROUP, outputs) if is_narrow or self.is_grouped else (outputs,)
        return jax.ShapeDtypeStruct(by_group, dtype if is_narrow else jnp.dtype(jnp.float32))

    def operands(self, shape: tuple[int, int], dtype: jnp.dtype) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the activations, weights and scales of the matmul with weights of this shape."""
        x = jax.ShapeDtypeStruct((self.num_tokens, shape[1]), dtype)
        return x, jax.ShapeDtypeStruct(shape, jnp.dtype(self.weights)), self._scales(shape, dtype)


def skinny_matmul(
    tuning: SkinnyTuning, x: jax.Array, weight: jax.Array, scales: jax.Array, *, is_dynamic: bool
) -> jax.Array:
    """Multiply as `matmul` does with its kernel."""
    from jaxserve_kernels.matmul.gpu import skinny  # imports Pallas

    if scales.ndim == 2:
        by_group: jax.Array = skinny.matmul(x, weight, scales, tuning=tuning)
        return by_group
    return skinny.scaled_matmul(x, weight, scales, dynamic=is_dynamic, tuning=tuning)


def cells(config: DecoderConfig) -> dict[str, Shapes]:
    """The matmuls of a layer that are chains, and the head. What has other sizes is left to XLA."""
    model, inner = config.hidden_size, config.intermediate_size
    return {
        "attention output": ((model, model),),
        "up and down": ((inner, model), (model, inner)),
        "head": ((config.vocab_size, model),),
    }


def served_sizes(chain: Chain, dtype: jnp.dtype) -> SkinnyTuning | None:
    """Return the sizes with which the server takes our kernel for all weights in groups of a chain; None: for some it does not."""
    found = {grouped_choice(*chain.operands(shape, dtype)) for shape in chain.shapes}
    return found.pop() if len(found) == 1 else None


def grouped_candidates(chain: Chain, dtype: jnp.dtype) -> list[SkinnyTuning]:
    """Return the sizes of our kernel for a chain of weights in groups: the server's first, and half of its stages last."""
    served = served_sizes(chain, dtype)
    if served is None:
        return []
    _, weight, scales = chain.operands(chain.shapes[0], dtype)
    found = [served]
    for workers, rows in ((2, 64), (2, 128), (4, 64)):
        sizes = replace(served, workers=workers, rows=rows)
        most = most_stages(sizes, max(8, chain.num_tokens), weight, scales)
        fits = rows * workers * chain.num_tokens <= 256 * 64 and all(out % sizes.block == 0 for out, _ in chain.shapes)
        found += [replace(sizes, stages=most)] if fits else []
    return list(dict.fromkeys([*found, replace(served, stages=max(2, served.stages // 2))]))


def candidates(num_tokens: int, shapes: Shapes) -> list[SkinnyTuning]:
    """Return sizes that divide the weights, with as many stages as fit the shared memory, likely ones first."""
    found = []
    narrow = ((4, 64), (2, 64)) if num_tokens <= MOST_TOKENS_OF_FOUR else ((2, 64), (2, 128))
    for workers, rows, tile in (*((*each, 128) for each in narrow), (2, 64, 256), (2, 128, 256)):
        block = workers * rows
        stages = min(MOST_STAGES, RING_BYTES // (tile * (block + 2 * max(8, num_tokens))))
        fits = all(outputs % block == 0 and inputs % tile == 0 for outputs, inputs in shapes)
        if fits and stages >= 2 and rows * num_tokens <= 128 * 128:  # sums of all are kept in registers
            found.append(SkinnyTuning(rows=rows, tile=tile, stages=stages, programs=PROGRAMS, workers=workers))
    return found


class Weights:
    """Random ones, made when they are first asked for and kept until others are. dtype: of activations."""

    def __init__(self, seed: int, dtype: jnp.dtype) -> None:
        self._dtype = dtype
        self._random = np.random.default_rng(seed)
        self._key: tuple[Shapes, str] | None = None
        self._arrays: tuple[list[jax.Array | None], list[jax.Array]] = ([], [])

    def of(self, chain: Chain) -> tuple[list[jax.Array | None], list[jax.Array]]:
        """Scales of each shape, and the weights of all repetitions; matmuls keep the size of numbers as it is."""
        key = (chain.shapes, chain.types)
        if self._key != key:
            self._key, self._arrays = key, ([], [])  # the old ones go first: both may not fit
            weights = [self._weight(shape, chain) for shape in chain.shapes * chain.num_repeats]
            own = weights[: len(chain.shapes)]
            scales = [_scales(weight, chain, self._dtype) if chain.has_scales else None for weight in own]
            self._arrays = scales, weights
        return self._arrays

    def activations(self, chain: Chain) -> jax.Array:
        drawn = self._random.standard_normal((chain.num_tokens, chain.shapes[0][1]), np.float32)
        return jnp.asarray(drawn, self._dtype)

    def _weight(self, shape: tuple[int, int], chain: Chain) -> jax.Array:
        key, dtype = jax.random.key(self._random.integers(1 << 30)), chain.weights
        if jnp.dtype(dtype).itemsize > 1:
            return jax.random.normal(key, shape, jnp.dtype(dtype)) * jnp.asarray(shape[1] ** -0.5, dtype)
        bits = jax.random.bits(key, shape, jnp.uint8)
        if dtype == "int4":
            return ((bits & 15).astype(jnp.int8) - 8).astype(chain.stored)
        if dtype != "int8":
            bits = bits & 0xBF  # no exponent that NaN has
        return jax.lax.bitcast_convert_type(bits, jnp.dtype(dtype))


def _scales(weight: jax.Array, chain: Chain, dtype: jnp.dtype) -> jax.Array:
    (outputs, inputs), mean_square = weight.shape, jnp.mean(jnp.square(weight[:64].astype(jnp.float32)))
    scale = 1 / jnp.sqrt(mean_square * inputs)
    kind = chain.operands((outputs, inputs), dtype)[2]
    return jnp.full(kind.shape, scale, kind.dtype)
