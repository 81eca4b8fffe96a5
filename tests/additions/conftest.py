"""A copy of the program for each addition."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.additions.overlay import Overlay, copy_program


@pytest.fixture
def overlay(tmp_path: Path) -> Overlay:
    """A fresh copy of the program: an addition sees no other."""
    folder = tmp_path / "program"
    folder.mkdir()
    return copy_program(folder)
