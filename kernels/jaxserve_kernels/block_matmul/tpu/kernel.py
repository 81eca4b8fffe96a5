"""Matmuls with GGUF blocks in words for TPUs: `matmul.tpu.words` with the arithmetic of `upcast`. Weights are rounded once, to bfloat16."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from jaxserve_kernels.block_kinds import BlockKind
from jaxserve_kernels.block_matmul.tpu.upcast import upcast
from jaxserve_kernels.grouped_matmul.tpu.words import multiply_groups
from jaxserve_kernels.matmul.tpu import WordsTuning
from jaxserve_kernels.matmul.tpu.words import multiply
from jaxserve_kernels.tpu_words import code_words, scale_words


@functools.partial(jax.jit, static_argnames=("kind", "tuning"))
def block_matmul(
    x: Float[Array, "T I"], words: Int[Array, "W O"], *, kind: BlockKind, tuning: WordsTuning
) -> Float[Array, "T O"]:
    """See `api.block_matmul`; shapes: see `tpu.choice`."""
    return multiply(x, (words,), _Blocks(kind), tuning)


@functools.partial(jax.jit, static_argnames=("kind", "tuning"))
def grouped_block_matmul(
    x: Float[Array, "T I"],
    words: Int[Array, "E W O"],
    group_sizes: Int[Array, "E"],
    *,
    kind: BlockKind,
    tuning: WordsTuning,
) -> Float[Array, "T O"]:
    """See `api.grouped_block_matmul`; shapes: see `tpu.grouped_choice`."""
    return multiply_groups(x, (words,), group_sizes, _Blocks(kind), tuning)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """See `words.Upcast`."""

    kind: BlockKind

    def scratch(self, num_inputs: int, num_outputs: int) -> list[Any]:
        return []

    def prepare(self, refs: tuple[Any, ...]) -> None:
        pass

    def unit(self, refs: tuple[Any, ...], index: Any) -> Float[Array, "I O"]:
        (words,) = refs
        num_codes, num_scales = code_words(self.kind), scale_words(self.kind)
        scales_start = len(words) // (num_codes + num_scales) * num_codes
        codes = words[pl.ds(pl.multiple_of(index * num_codes, 8), num_codes), :]
        # Rows from any place are taken one by one.
        first = scales_start + index * num_scales
        scales = jnp.concatenate([words[pl.ds(first + row, 1), :] for row in range(num_scales)])
        return upcast(self.kind, codes, scales)
