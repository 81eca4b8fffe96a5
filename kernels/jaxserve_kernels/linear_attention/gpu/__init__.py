"""Linear attention for GPUs in Pallas Mosaic GPU: tokens one after the other or by chunks, and states that are updated in place.

Only `attention` and the modules that it imports import Pallas, and only programs for GPUs import these.
"""

from __future__ import annotations

from typing import Final

import jax

from jaxserve_kernels.backend import Backend
from jaxserve_kernels.segments import CHUNK

BACKENDS: Final[frozenset[Backend]] = frozenset({"mosaic_gpu", "mosaic_gpu_mma"})
"""The backends whose programs take the kernels. Their instructions are those of compute capability 8.0, so they are the same for both."""
COLUMNS: Final = 64
"""Columns of a state that a program computes, and the only number of them that it computes by chunks."""
OTHER_COLUMNS: Final = 80
"""Columns of a program for values that have no multiple of COLUMNS: those of Nemotron-H."""
ROW_GROUPS: Final = 8
"""Parts of the rows of a column: each is one thread's."""
FEWEST_TOKENS: Final = 512
"""Tokens of a program from which chunks are computed by matmuls: the launches that prepare them take as long as some 300 tokens one
after the other, by estimate (docs/decisions/0104)."""
_FIRST_JAX = (0, 11, 2)
_MOST_ROWS = 256
"""Rows of a state, the numbers of a key, that registers hold."""


def num_columns(value_dim: int) -> int | None:
    """Return how many columns of a state a program computes; None if values of this size have no kernel."""
    return next((columns for columns in (COLUMNS, OTHER_COLUMNS) if value_dim % columns == 0), None)


def takes_chunks(key_dim: int, value_dim: int, num_tokens: int) -> bool:
    """Return whether a program of so many tokens computes whole chunks by matmuls, not their tokens one after the other."""
    return key_dim % CHUNK == 0 and num_columns(value_dim) == COLUMNS and num_tokens >= FEWEST_TOKENS


def unsupported(key_dim: int, value_dim: int) -> str | None:
    """Return in a few words why states of this shape have no kernel; None if they have one."""
    if jax.__version_info__ < _FIRST_JAX:
        return f"jax {jax.__version__} is older than {'.'.join(map(str, _FIRST_JAX))}"
    if key_dim % ROW_GROUPS or key_dim > _MOST_ROWS:
        return f"keys of {key_dim} numbers: only multiples of {ROW_GROUPS} up to {_MOST_ROWS}"
    if num_columns(value_dim) is None:
        return f"values of {value_dim} numbers: only multiples of {COLUMNS} and {OTHER_COLUMNS}"
    return None
