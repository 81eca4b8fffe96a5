"""Options that scale all logits of a row, applied in every row that samples: `(logits, value) -> logits`."""

from __future__ import annotations

from typing import Final

import jax.numpy as jnp
from jaxtyping import Array, Float

_LOWEST_TEMPERATURE: Final = 1e-6


def temperature(logits: Float[Array, "B V"], value: Float[Array, "B"]) -> Float[Array, "B V"]:
    """Divide by the temperature; greedy rows (0) are not changed. A lower one than 1e-6 would overflow float32."""
    return logits / jnp.where(value > 0, jnp.maximum(value, _LOWEST_TEMPERATURE), 1.0)[:, None]
