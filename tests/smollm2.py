"""SmolLM2-135M-Instruct in one shape for all tests: its programs take as long to compile as those tests to run."""

from __future__ import annotations

from typing import Final

LIMITS: Final = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 2048,
    "kv_cache_memory": 256 << 20,
}
FLAGS: Final = tuple(word for name, value in LIMITS.items() for word in ("--" + name.replace("_", "-"), str(value)))
"""The same for a server."""
