"""Settings of the memory that API processes may take."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.config.option import option


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryConfig:
    """Memory of the API processes, which divide it."""

    max_reply_memory: int = option(
        2 << 30,
        ge=1 << 20,
        unit="bytes",
        help="bytes that log-probabilities and routed experts of all replies under way may take; a request that may need more alone gets "
        "413, others get 429",
    )
