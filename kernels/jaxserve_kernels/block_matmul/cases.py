"""Conformance cases of matmuls with weights in the blocks of GGUF files, with operands and the answer in float64.

Padding rows of the activations hold NaN, which may not reach a result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxserve_kernels.backend import Backend
from jaxserve_kernels.block_kinds import BLOCK_KINDS, BlockKind, pack_tiles
from jaxserve_kernels.block_matmul.api import block_matmul, grouped_block_matmul
from jaxserve_kernels.block_matmul.reference import dequantize_tiles, round_inputs
from jaxserve_kernels.ops import as_arrays

_TOLERANCE = 1e-6
"""Largest error of a result, relative to the sum of its terms' sizes: products are added in float32."""


@dataclass(frozen=True, slots=True)
class Case:
    """One matmul of `num_tokens` rows and `padding` more, with `num_blocks` blocks of a type along the inputs."""

    kind: str
    num_tokens: int
    padding: int = 0
    num_outputs: int = 48
    num_blocks: int = 2
    dynamic: bool = False
    group_sizes: tuple[int, ...] | None = None
    """Rows of each expert, `num_tokens` together; None: there is one matrix."""

    def __str__(self) -> str:
        rounded = "-rounded" if self.dynamic else ""
        rows = self.num_tokens if self.group_sizes is None else "_".join(map(str, self.group_sizes))
        return f"{rows}+{self.padding}x{self.num_blocks}x{self.num_outputs}-{self.kind}{rounded}"


class Operands(NamedTuple):
    """Arrays of one call; see `api`."""

    x: np.ndarray  # (T, I)
    tiles: np.ndarray  # (E, R, B, Y): one expert is a single matrix


def random_blocks(kind: BlockKind, random: np.random.Generator, num_rows: int, num_blocks: int) -> np.ndarray:
    """Return blocks as a file stores them, uint8 `[rows, bytes of a row]`: any codes, and scales that are no NaN."""
    blocks = random.integers(0, 256, (num_rows, num_blocks, kind.stored_bytes)).astype(np.uint8)
    for at in (208,) if kind.name == "Q6_K" else (0, 2) if kind.has_minimum else (0,):
        scales = random.standard_normal((num_rows, num_blocks, 1)).astype(np.float16)
        blocks[..., at : at + 2] = scales.view(np.uint8)
    return blocks.reshape(num_rows, -1)


def operands(case: Case, seed: int = 0) -> Operands:
    """Return random operands of a case."""
    random, kind = np.random.default_rng(seed), BLOCK_KINDS[case.kind]
    x = random.standard_normal((case.num_tokens + case.padding, case.num_blocks * kind.num_inputs)).astype(np.float32)
    x[case.num_tokens :] = np.nan
    num_experts = len(case.group_sizes or (case.num_tokens,))
    tiles = pack_tiles(kind, random_blocks(kind, random, num_experts * case.num_outputs, case.num_blocks))
    return Operands(x, tiles.reshape(num_experts, -1, *tiles.shape[1:]))


def run(case: Case, given: Operands, backend: Backend, *, is_emulated: bool = False) -> Float[Array, "T O"]:
    """Multiply the operands of a case. See `ops.OpCases`."""
    x, tiles = as_arrays(given)
    kind, dynamic, sizes = BLOCK_KINDS[case.kind], case.dynamic, case.group_sizes
    if sizes is None:
        return block_matmul(x, tiles[0], jnp.int32(case.num_tokens), kind=kind, dynamic=dynamic, backend=backend)
    return grouped_block_matmul(x, tiles, jnp.asarray(sizes), kind=kind, dynamic=dynamic, backend=backend)


def error(case: Case, given: Operands, out: Any) -> float:
    """Return the largest error relative to the tolerance. See `ops.OpCases`."""
    x = given.x[: case.num_tokens]
    if case.dynamic:
        x = np.asarray(round_inputs(jnp.asarray(x)))
    weights = np.asarray(dequantize_tiles(BLOCK_KINDS[case.kind], jnp.asarray(given.tiles)), np.float64)
    experts = np.repeat(np.arange(len(weights)), case.group_sizes or (case.num_tokens,))
    own, wide = weights[experts], x.astype(np.float64)
    wanted, sizes = np.einsum("ti,toi->to", wide, own), np.einsum("ti,toi->to", np.abs(wide), np.abs(own))
    difference = np.abs(np.asarray(out, np.float64)[: case.num_tokens] - wanted) / sizes
    return float(np.nan_to_num(difference, nan=np.inf).max()) / _TOLERANCE


CASES = tuple(
    Case(name, num_tokens, padding=3, dynamic=dynamic)
    for name in BLOCK_KINDS
    for num_tokens, dynamic in ((1, True), (17, False))
) + tuple(
    Case(name, 19, padding=2, dynamic=dynamic, group_sizes=(0, 1, 0, 15, 3, 0))
    for name in BLOCK_KINDS
    for dynamic in (False, True)
)
"""Every type: one row and more than a tile of rows, with activations rounded and as they are; experts, some of them without rows."""
SLOW = tuple(case for case in CASES if case.kind not in ("Q4_0", "Q6_K"))
BACKENDS: tuple[Backend, ...] = ("native",)
