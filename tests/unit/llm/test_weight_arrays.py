"""Arrays go to the engine in a file that only the user can open, and that is gone afterwards."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxserve.checkpoint.safetensors_file import open_safetensors
from jaxserve.errors import InvalidRequestError, UnavailableError
from jaxserve.llm.weight_arrays import arrays_file

ARRAYS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3)}


def test_the_file_is_private_and_gone_after_the_block(tmp_path: Path) -> None:
    with arrays_file(ARRAYS, tmp_path) as path:
        assert path.parent.parent == tmp_path
        assert path.parent.stat().st_mode & 0o777 == 0o700
        np.testing.assert_array_equal(open_safetensors(path).read("a"), ARRAYS["a"])
    assert list(tmp_path.iterdir()) == []


def test_without_shared_memory_it_is_a_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with arrays_file(ARRAYS, tmp_path / "none") as path:
        assert path.parent.parent == tmp_path
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(UnavailableError, match="No such file"), arrays_file(ARRAYS, tmp_path / "none"):
        pass


OTHER = SimpleNamespace(shape=(2,), dtype="torch.bfloat16")
"""A tensor of a library whose types numpy does not know."""


@pytest.mark.parametrize("arrays", [{}, {"a": 3}, {3: ARRAYS["a"]}, {"a": np.zeros(2)}, {"a": OTHER}])
def test_what_is_no_array_is_refused(tmp_path: Path, arrays: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="'arrays': "), arrays_file(arrays, tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
