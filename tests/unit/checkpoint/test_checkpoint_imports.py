"""The checkpoint room is light: the API process imports it for the tokenizer in a GGUF file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HEAVY = ("jax", "transformers", "huggingface_hub", "gguf", "torch")


def test_importing_every_checkpoint_module_imports_nothing_heavy() -> None:
    program = (
        "import importlib, pkgutil, sys, jaxserve.checkpoint as room\n"
        "for module in pkgutil.iter_modules(room.__path__): importlib.import_module(f'{room.__name__}.{module.name}')\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"
