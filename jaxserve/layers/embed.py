"""Token embedding, which may double as the output head."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from jaxserve.layers.linear import Matrix
from jaxserve.layers.policy import DtypePolicy


class Embedding(Matrix):
    """A `[V, D]` table: looked up by id, or multiplied with to give logits. Of 4-bit models it has 8."""

    def __init__(self, vocab_size: int, dim: int, policy: DtypePolicy) -> None:
        super().__init__(vocab_size, dim, ("vocab", "embed"), policy.for_tables)

    def __call__(self, token_ids: Int[Array, "T"]) -> Float[Array, "T D"]:
        table = self.weight.get_value()
        rows: Array = table.format.lookup(table, token_ids, self.policy.activations)
        return rows

    def logits(self, x: Float[Array, "B D"], num_rows: Int[Array, ""]) -> Float[Array, "B V"]:
        """Scores of every token, in float32 whatever the weights are; rows behind `num_rows` are padding."""
        return self.multiply(x, num_rows)
