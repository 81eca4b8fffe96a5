"""Tests that no lane of CI runs."""

from __future__ import annotations

import re

from tests.architecture.sources import ROOT


def test_what_is_marked_newest_lies_where_that_lane_looks() -> None:
    """`make newest-kernels` takes a few folders, and all other lanes leave out what has this mark."""
    found = re.search(r'AOT_TESTS="([^"]+)"', (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert found is not None
    folders = tuple(found[1].split())
    marked = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"mark\.newest\b", path.read_text(encoding="utf-8"))
    ]
    assert marked
    assert [name for name in marked if not name.startswith(folders)] == []
