"""The formats' names, from the names of their files: cheap enough for every command."""

from __future__ import annotations

import pkgutil
from typing import Final

from jaxserve.quant import formats

NO_QUANTIZATION: Final = "none"
_CHECKPOINT_ONLY: Final = "stored_"
"""Start of the name of a module whose format only checkpoints have: it is dequantised as it is loaded."""


def format_modules() -> list[str]:
    """Return the names of all modules that hold a format."""
    return [module.name for module in pkgutil.iter_modules(formats.__path__) if not module.name.startswith("_")]


def format_names() -> tuple[str, ...]:
    """Return the formats that `--quantization` offers, "none" first."""
    names = (name.replace("_", "-") for name in format_modules() if not name.startswith(_CHECKPOINT_ONLY))
    return tuple(sorted(names, key=lambda name: (name != NO_QUANTIZATION, name)))
