"""Token embedding, which may double as the output head."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from jaxserve.layers.linear import Matrix
from jaxserve.layers.policy import DtypePolicy


class Embedding(Matrix):
    """A `[V, D]` table: looked up by token, or multiplied with to get logits. 4-bit formats store it in 8 bits."""

    def __init__(self, vocab_size: int, dim: int, policy: DtypePolicy) -> None:
        super().__init__(vocab_size, dim, ("vocab", "embed"), policy.for_tables)

    def __call__(self, token_ids: Int[Array, "T"]) -> Float[Array, "T D"]:
        table = self.weight.get_value()
        rows: Array = table.format.lookup(table, token_ids, self.policy.activations)
        return rows

    def logits(self, x: Float[Array, "B D"], num_rows: Int[Array, ""]) -> Float[Array, "B V"]:
        """Return float32 logits of the vocabulary; rows after `num_rows` are padding."""
        return self.multiply(x, num_rows)
