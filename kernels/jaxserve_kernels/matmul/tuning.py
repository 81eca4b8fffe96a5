"""For which matmuls a device's own kernel is faster than XLA, and with which sizes: data in `tuning/<device>.json`.

An entry is a measurement (`make gpu-check`, part `tune_matmuls`): `{types: {tokens: {MiB of the weights: sizes}}}`.
Where there is none, XLA computes the matmul.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxserve_kernels import tuned_sizes

TOKENS = (8, 16, 32, 64, 128, 256)
"""Upper ends of the classes of numbers of tokens."""


@dataclass(frozen=True, slots=True)
class SkinnyTuning:
    """Sizes of the kernel for GPUs."""

    rows: int
    """Outputs of one of a program's workers: 64 or 128."""
    tile: int
    """Inputs of one step."""
    stages: int
    """Steps in flight."""
    programs: int
    """Thread blocks that the inputs are split for, where the outputs alone would occupy fewer."""
    workers: int = 2
    """Warpgroups of a program that compute: 2, or 4 of at most 64 rows and tokens."""

    @property
    def block(self) -> int:
        """Outputs of a program at a time."""
        return self.workers * self.rows


def skinny_tuning(device: str, types: str, num_tokens: int, weight_bytes: int) -> SkinnyTuning | None:
    """Sizes for a matmul of such types (`matmul_types`); None where XLA is faster or nothing was measured."""
    tokens = next((str(most) for most in TOKENS if num_tokens <= most), "more")
    sizes = load(device).get(types, {}).get(tokens, {}).get(size_class(weight_bytes))
    return None if sizes is None else SkinnyTuning(**sizes)


def matmul_types(weights: str, *, dynamic: bool) -> str:
    """Name of a matmul: `int8` where weights are widened, `int8 x int8` where activations are quantised as well."""
    return f"{weights} x {weights}" if dynamic else weights


def size_class(weight_bytes: int) -> str:
    """MiB, rounded down to a power of two."""
    return str(1 << (max(weight_bytes >> 20, 1).bit_length() - 1))


def load(device: str) -> dict[str, Any]:
    """Return the sizes that are known for a device. Raises FileNotFoundError."""
    return tuned_sizes.load(__package__, device)
