"""Importing jaxserve.checkpoint is cheap: the API process needs it for the tokenizer in a GGUF file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HEAVY = ("jax", "transformers", "huggingface_hub", "gguf", "torch")


def test_importing_every_checkpoint_module_imports_nothing_heavy() -> None:
    program = (
        "import importlib, pkgutil, sys, jaxserve.checkpoint as package\n"
        "for module in pkgutil.walk_packages(package.__path__, 'jaxserve.checkpoint.'): importlib.import_module(module.name)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"
