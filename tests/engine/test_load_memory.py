"""Peak memory of loading: the parameters, and little more than one of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import restore
from jaxserve.executor.convert import convert
from tests.architecture.sources import ROOT
from tests.engine.model_engine import MODEL_NAME
from tests.models.goldens import DATA
from tests.tools.maxtext_checkpoints import write_maxtext

pytestmark = [pytest.mark.slow]
NUM_LAYERS = 32
MARGIN_BYTES = 48 << 20
"""Arenas, thread stacks and pages of mapped files, which do not grow with the model; less than a third of it."""


def test_loading_needs_little_more_memory_than_the_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From safetensors, an Orbax conversion and MaxText's arrays. A second copy of the model would be three times the margin."""
    for name, value in {"WIDTH": 384, "FFN": 1536, "HEADS": 6, "VOCAB": 2048}.items():
        monkeypatch.setattr(restore, name, value)
    model, output, run = tmp_path / "model", tmp_path / "converted", tmp_path / "run"
    restore.make_model(model, NUM_LAYERS)
    convert(restore.settings(model, "none"), model, output, lambda *_: None)
    write_maxtext(model, run, dtype="bfloat16", is_scanned=False)
    command = [sys.executable, "-m", "tests.engine.load_memory", *map(str, (DATA / MODEL_NAME, model, output, run))]
    environment = os.environ | {"MALLOC_ARENA_MAX": "2"}  # else each thread of tensorstore keeps what it has freed
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    for found in map(json.loads, done.stdout.splitlines()):
        assert found["params"] > 3 * MARGIN_BYTES
        assert found["risen"] < found["params"] + 3 * found["largest"] + MARGIN_BYTES, done.stdout
    assert len(done.stdout.splitlines()) == 3
