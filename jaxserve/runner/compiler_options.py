"""Options of the compiler, by platform."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from jaxserve.runner.program_cache import ProgramCache

PROGRAM_OPTIONS: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {"gpu": MappingProxyType({"xla_disable_hlo_passes": "rematerialization"})}
)
"""Options that change programs, and so belong to their cache keys; none for other platforms.

GPUs: nothing is computed twice to save memory. XLA counts the KV cache twice, as an argument and as a result, finds that both
do not fit the device, and repeats matmuls and writes, which saves none of it.
"""


def compiler_options(platform: str, cache: ProgramCache) -> dict[str, Any] | None:
    """Return the compiler's options for a platform, None for its defaults.

    GPUs: choices of the autotuner are kept, so that a program that is compiled later, or for another context length, takes what
    was measured when the device was idle.
    """
    options = PROGRAM_OPTIONS.get(platform)
    if options is None:
        return None
    tuned = cache.tuned_directory
    return {**options, **({} if tuned is None else {"xla_gpu_per_fusion_autotune_cache_dir": str(tuned)})}
