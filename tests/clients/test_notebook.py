"""`examples/notebook.ipynb`, executed as a user would run it, on a CPU with the default model."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.lane import library
from tests.e2e.http_server import PYTHON, ROOT, SOURCES

nbclient = library("nbclient")
nbformat = library("nbformat")

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the command `jaxserve` of this checkout on the path, and end what it has left running."""
    folder, started = tmp_path / "bin", tmp_path / "started"
    folder.mkdir()
    command = folder / "jaxserve"
    command.write_text(
        f"#!/bin/sh\necho $$ >>{started}\n"
        f'PYTHONPATH={SOURCES} JAX_PLATFORMS=cpu exec {PYTHON} -m jaxserve.cli.main "$@"\n'
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))
    yield
    for pid in started.read_text().split() if started.exists() else ():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("launcher")
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    on_cpu = next(cell for cell in notebook.cells if "device = find_device()" in cell.source)
    on_cpu.source = on_cpu.source.replace("device = find_device()", 'device = "cpu"')  # also on a machine with a GPU
    nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    install, dtype, start, ask, stream, structured, batch, end = map(text_of, code_cells(notebook))
    assert install == "device: cpu\n"
    assert dtype == "dtype: float32 model: the default one\n"
    assert "jaxserve is ready" in start
    assert ask == "The capital of France is Paris.\n"
    assert int(stream.splitlines()[-1].removesuffix(" pieces")) > 1, "text comes as it is written"
    assert structured.startswith("City(name=")
    rows = [json.loads(line) for line in batch.splitlines() if line]
    assert [row["id"] for row in rows] == [0, 1, 2, 3]
    assert rows[0]["text"].startswith(" Paris")
    assert (tmp_path / "replies.jsonl").read_text().strip() == batch.strip()
    assert "serving" in end
    assert end.endswith("exit status: 0\n")


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_of(cell: Any) -> str:
    """Return what a cell has printed."""
    return "".join(output.text for output in cell.outputs)
