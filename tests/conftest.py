"""Settings before jax starts (eight CPU devices, for parallelism; a folder for compiled programs), and the order of tests."""

from __future__ import annotations

import gc
import os
import tempfile
from importlib.metadata import version
from pathlib import Path

import jax
import pytest

from tests.programs import VARIABLE
from tests.selection import may_select

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "1" and "XLA_FLAGS" not in os.environ:
    # Servers inherit these. Workers keep all processors busy, so code of one program made in several threads only costs
    # more: 15 % of a program's compile time. The older emitters of fused loops, which jaxlib 0.10 still has, compile twice as fast.
    flags = ["--xla_cpu_parallel_codegen_split_count=1"]
    if version("jaxlib").startswith("0.10."):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join(flags)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

FIRST_FOLDERS = ("architecture", "unit", "perf")
"""Fast tests that fail likeliest. The longest files follow, then the others in the order of their names."""
LONGEST = (
    "tests/engine/test_model_engine.py",
    "tests/engine/test_speculation.py",
    "tests/engine/test_deterministic.py",
    "tests/engine/test_images.py",
    "tests/engine/test_hybrid_engine.py",
    "tests/engine/test_prompt_embeds.py",
    "tests/e2e/test_api_processes.py",
    "tests/e2e/test_engine_restarts.py",
    "tests/e2e/test_http_lifecycle.py",
    "tests/e2e/test_real_lifecycle.py",
    "tests/e2e/test_real_model.py",
)
"""Files, none of whose tests go to another worker, that take longest: they begin early, so that no worker is left with one at the end."""
NEW_OBJECTS_PER_COLLECTION = 50_000

gc.disable()
"""Until all tests are collected: what is imported and collected stays, and walking through it takes seconds."""


def pytest_configure(config: pytest.Config) -> None:
    if VARIABLE not in os.environ:  # workers inherit it from the first process
        folder = tempfile.TemporaryDirectory(prefix="jaxserve-programs-", ignore_cleanup_errors=True)
        os.environ[VARIABLE] = folder.name
        config.add_cleanup(folder.cleanup)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out client libraries, which have an environment and settings of their own, and files of which no test is selected."""
    if collection_path.name == "clients" and collection_path.parent.name == "tests":
        return True
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    is_selected = may_select(config.option.markexpr, collection_path.read_text(encoding="utf-8"))
    return None if is_selected else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if changing := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"the names of these tests hold an address, so workers disagree on them: {changing}")
    items.sort(key=_rank)


def pytest_collection_finish() -> None:
    """Look for cycles rarely: tracing makes millions of objects that reference counts free."""
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS_PER_COLLECTION)
    gc.enable()


def _rank(item: pytest.Item) -> int:
    found = (rank for rank, name in enumerate(FIRST_FOLDERS) if name in item.path.parts)
    return next(found, len(FIRST_FOLDERS) + (item.nodeid.partition("::")[0] not in LONGEST))
