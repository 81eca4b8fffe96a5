"""The choices of `examples/notebook.ipynb` for devices that are not here; `make clients-check` executes it on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[3] / "examples" / "notebook.ipynb"


def code_cells() -> list[dict[str, Any]]:
    return [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def function(name: str) -> Any:
    """Return a function that a cell of the notebook defines."""
    (source,) = ("".join(cell["source"]) for cell in code_cells() if f"def {name}(" in "".join(cell["source"]))
    start = source.index(f"def {name}(")
    lines = source[start:].splitlines()
    body = [lines[0], *(line for line in lines[1 : _end(lines)])]
    namespace: dict[str, Any] = {"Path": Path}
    exec("\n".join(body), namespace)
    return namespace[name]


def _end(lines: list[str]) -> int:
    """Return the first line after a function's body."""
    return next((i for i, line in enumerate(lines) if i and line and not line.startswith(" ")), len(lines))


def test_it_is_stored_without_outputs() -> None:
    assert len(code_cells()) >= 8
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code_cells())


@pytest.mark.parametrize(
    ("files", "device"),
    [
        (["accel0", "null"], "tpu"),
        (["vfio/vfio", "vfio/0"], "tpu"),
        (["nvidia0", "nvidiactl"], "cuda"),
        (["nvidiactl", "vfio/vfio", "null"], "cpu"),
    ],
)
def test_the_first_cell_finds_the_device(tmp_path: Path, files: list[str], device: str) -> None:
    for name in files:
        file = tmp_path / "dev" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert function("find_device")(tmp_path) == device


@pytest.mark.parametrize(
    ("device", "capability", "dtype"),
    [("tpu", None, "bfloat16"), ("cuda", 7.5, "float16"), ("cuda", 8.9, "bfloat16"), ("cpu", None, "float32")],
)
def test_a_gpu_without_bfloat16_computes_in_float16(device: str, capability: float | None, dtype: str) -> None:
    assert function("choose_dtype")(device, capability) == dtype
