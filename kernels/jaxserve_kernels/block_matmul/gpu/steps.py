"""The steps of kernels for Hopper that multiply with GGUF blocks: tiles in shared memory, upcast in registers, times rows of x.

Outputs are the rows of the tensor cores' matmuls; the 16 of a tile are those of a warp. Codes less their zero are exact in bfloat16. The sums of
a group, the inputs that share a scale, are multiplied with it in float32 before they are added, so weights are those of the file, not
rounded. What a type subtracts from all weights of a group is multiplied with the sum of the group's activations.

Letters: T rows of x, I inputs, O outputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve_kernels.block_kinds import TILE, BlockKind
from jaxserve_kernels.block_matmul.gpu import ROWS, upcast
from jaxserve_kernels.block_matmul.reference import scaled_codes
from jaxserve_kernels.hopper import stored, tiled

LINE = 32
"""Bytes of the innermost dimension of copies: all types' steps are multiples of it."""
_REGISTERS = 48
"""Registers of a thread for codes and sums of the groups that are multiplied at the same time."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Compile-time parameters of the steps of one launch."""

    kind: BlockKind
    inputs: int
    """Inputs of a step."""
    columns: int
    """Rows of x: columns of the tensor cores' matmuls, which come in eights."""
    is_emulated: bool
    """True if the interpreter runs it."""

    @property
    def group(self) -> int:
        """Inputs of a group."""
        return upcast.group_of(self.kind)

    @property
    def groups(self) -> int:
        """Groups of a step."""
        return self.inputs // self.group

    @property
    def num_bytes(self) -> int:
        """Bytes of a step of one tile."""
        return self.inputs // self.kind.num_inputs * self.kind.tile_bytes

    @property
    def lines(self) -> int:
        """Lines of a step of one tile."""
        return self.num_bytes // LINE

    @property
    def at_once(self) -> int:
        """Groups that are multiplied at the same time: a power of two."""
        if self.is_emulated:
            return 1
        most = _REGISTERS // (self.group // 4 + self.columns // 2)
        return 1 << (max(1, min(self.groups, most)).bit_length() - 1)

    @property
    def num_copies(self) -> int:
        """Copies of a step: of weights, x, and the sums of groups if the type needs them."""
        return 2 + self.kind.has_minimum

    def operands(self, x: Float[Array, "T I"]) -> list[Array]:
        """Return x by groups `[G, T, inputs]`, and the sums of each group's activations, float32 `[G, T]`, if the type needs them."""
        by_group = x.reshape(len(x), -1, self.group).swapaxes(0, 1)
        own = by_group if self.is_emulated else upcast.permuted(by_group, self.kind)
        return [own, by_group.astype(jnp.float32).sum(-1)] if self.kind.has_minimum else [own]

    def scratch(self, stages: int, workers: int, dtype: Any) -> dict[str, Any]:
        """Return the rings, each of `stages` steps."""
        rings = {
            "x_ring": tiled((stages, self.groups, self.columns, self.group), dtype),
            "w_ring": plgpu.SMEM((stages, workers * ROWS // TILE, self.lines, LINE), jnp.uint8),
        }
        if self.kind.has_minimum:
            rings["s_ring"] = plgpu.SMEM((stages, self.groups, self.columns), jnp.float32)
        if self.is_emulated:
            rings["wide"] = tiled((workers, ROWS, self.group), dtype)
        return rings

    def add(self, rings: dict[str, Any], slot: Any, worker: Any, total: Array) -> Array:
        """Return `total` `[outputs of a worker, T]` and the matmul of a step."""
        for first in range(0, self.groups, self.at_once):
            total = self._add_groups(rings, slot, worker, range(first, first + self.at_once), total)
        if self.is_emulated:
            plgpu.commit_smem()  # the interpreter orders reads and later copies by such fences, a GPU by the slot's barrier
        return total

    def _add_groups(self, rings: dict[str, Any], slot: Any, worker: Any, groups: range, total: Array) -> Array:
        parts, steps, offsets = self._weights(rings, slot, worker, groups)

        def multiply(*accumulators: Any) -> list[Array]:
            for group, accumulator, part in zip(groups, accumulators, parts, strict=True):
                plgpu.wgmma(accumulator, part, rings["x_ring"].at[slot, group].transpose((1, 0)))
            plgpu.wgmma_wait(0)
            return [accumulator[...] for accumulator in accumulators]

        shape = (ROWS, self.columns)
        matmuls = pl.run_scoped(multiply, *[plgpu.ACC(shape, jnp.float32)] * len(groups))
        for matmul, scales in zip(matmuls, steps, strict=True):
            total = total + matmul * jax.lax.broadcast_in_dim(scales, shape, (0,))
        for group, each in zip(groups, offsets, strict=False):  # or there are none
            sums = plgpu.load(rings["s_ring"].at[slot, group], layout=plgpu.Layout.WGMMA.reduce(0))
            own = jax.lax.broadcast_in_dim(each, shape, (0,))
            total = total - own * jax.lax.broadcast_in_dim(sums, shape, (1,))
        return total

    def _weights(
        self, rings: dict[str, Any], slot: Any, worker: Any, groups: range
    ) -> tuple[list[Any], Sequence[Array], Sequence[Array]]:
        """Return codes, scales, and what is subtracted, of some groups of a step."""
        count = ROWS // TILE
        tile = rings["w_ring"].at[slot, pl.ds(worker * count, count)]
        if self.is_emulated:
            (group,), weights = groups, scaled_codes(self.kind, tile[...].reshape(count, -1, self.kind.tile_bytes))
            own = weights.codes[:, group * self.group : (group + 1) * self.group].astype(jnp.bfloat16)
            offsets = [] if weights.offsets is None else [weights.offsets[:, group]]
            return [stored(own, rings["wide"].at[worker])], [weights.steps[:, group]], offsets
        wide, steps, offsets = upcast.upcast(tile, self.kind, groups)
        return [wide[:, i * self.group : (i + 1) * self.group] for i in range(len(groups))], steps, offsets
