"""States of rows in the slots of a pool: those of linear attention, and the windows of convolutions."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float, Int


class PooledStates(NamedTuple):
    """States of rows that lie in slots of a pool, and the slots for those after a step. Letters: L layers, Y slots.

    No row reads a slot that another one writes. A row without tokens has the slot that it reads to write, or none.
    """

    pool: Float[Array, "L Y *state"]
    layer: int | Int[Array, ""]
    reads: Int[Array, "B"]
    writes: Int[Array, "B"] | None
    """Y or more: the row's state is not written. None: none is, and the pool is not donated."""

    def read(self) -> Float[Array, "B *state"]:
        """Return copies of the rows' states."""
        return self.pool[self.layer, self.reads]

    def written(self, states: Float[Array, "B *state"]) -> PooledStates:
        """Return the pool with new states of the rows. DONATES the pool."""
        if self.writes is None:
            return self
        return self._replace(
            pool=self.pool.at[self.layer, self.writes].set(states.astype(self.pool.dtype), mode="drop")
        )
