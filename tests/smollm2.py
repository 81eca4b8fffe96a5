"""Limits of SmolLM2-135M-Instruct in all tests, which so share its programs: compiling takes as long as those tests."""

from __future__ import annotations

from typing import Final

LIMITS: Final = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 2048,
    "kv_cache_memory": 256 << 20,
}
FLAGS: Final = tuple(word for name, value in LIMITS.items() for word in ("--" + name.replace("_", "-"), str(value)))
"""These limits as flags of a server."""
