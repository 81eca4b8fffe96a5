"""The error for a value of `quantization_config` that is not read: one line that names it and what is supported."""

from __future__ import annotations

from typing import Final

from jaxserve.errors import CheckpointError

INSTEAD: Final = "a checkpoint in f32, f16 or bf16 (--quantization makes it small), or a GGUF file"
_MAX_SHOWN: Final = 80


def unsupported(key: str, value: object, supported: str) -> CheckpointError:
    """Return the error. key: below `quantization_config`, with a dot before it."""
    text = repr(value) if len(repr(value)) <= _MAX_SHOWN else repr(value)[:_MAX_SHOWN] + "..."
    return CheckpointError(f"model config: quantization_config{key} is {text}; supported: {supported}")
