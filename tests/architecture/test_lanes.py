"""No lane of CI leaves out a test that none of the others runs."""

from __future__ import annotations

import ast
import re
import subprocess
from typing import Final

import pytest

from tests.architecture.sources import ROOT
from tests.selection import MARKS, may_select

_MARK_SET: Final = re.compile(rf"\bmark\.({'|'.join(MARKS)})\b")


def test_what_is_marked_newest_lies_where_that_lane_looks() -> None:
    """`make newest-kernels` takes a few folders, and all other lanes leave out what has this mark."""
    found = re.search(r"NEWEST_TESTS := (.+)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert found is not None
    folders = tuple(found[1].split())
    marked = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"mark\.newest\b", path.read_text(encoding="utf-8"))
    ]
    assert marked
    assert [name for name in marked if not name.startswith(folders)] == []


def test_what_needs_a_compiler_lies_where_its_lane_looks() -> None:
    """`make kernels-check` takes a few folders, and `make test` leaves out what has the mark `aot`."""
    found = re.search(r"^AOT_TESTS := ([\w/ ]+) ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert found is not None
    marked = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"mark\.aot\b", path.read_text(encoding="utf-8"))
    ]
    assert marked
    assert [name for name in marked if not name.startswith(tuple(found[1].split()))] == []


def test_files_that_the_other_python_leaves_out_have_no_test_for_it() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    left_out = [
        prefix + name
        for prefix, names in re.findall(r"addprefix --ignore=(tests/\w+/test_),([\w.\s\\]+)\)", makefile)
        for name in re.findall(r"[\w.]+", names)
    ]
    assert len(left_out) > 10
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in left_out}
    assert [name for name, text in texts.items() if re.search(r"mark\.versions\b", text)] == []


def test_marks_that_select_tests_are_set_in_test_files_only() -> None:
    """`tests/selection.py` tells by a file's text which of its tests may have a mark."""
    declared = re.findall(r'^  "([a-z]+): ', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    assert sorted(declared) == sorted(MARKS)
    other = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("*.py")
        if not path.name.startswith("test_")
        and {*re.findall(r"\bmark\.(\w+)", path.read_text(encoding="utf-8"))} & {*MARKS}
    ]
    assert other == []


def test_marks_of_a_file_are_seen_in_its_text() -> None:
    """By another name, from another test file, or under a condition, a mark would not be seen, and its tests would run nowhere."""
    found = []
    for path in (ROOT / "tests").rglob("test_*.py"):
        text, place = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        if place == "tests/architecture/test_lanes.py":
            continue
        of_file = re.findall(r"^pytestmark\b.*", text, re.M)
        if len(of_file) > 1 or any(re.search(r" if | \+", line.partition("#")[0]) for line in of_file):
            found.append(f"{place}: pytestmark depends on something")
        if re.search(r"import mark\b|pytest\.mark\b(?!\.\w)|\badd_marker\b|import pytest as", text):
            found.append(f"{place}: pytest.mark has another name")
        for module, names in re.findall(r"^from (tests\.[\w.]*\.test_\w+) import ([\w, ]+|\([^)]*\))", text, re.M):
            other = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
            marked = {
                target.id
                for node in other.body
                if isinstance(node, ast.Assign) and _MARK_SET.search(ast.unparse(node.value))
                for target in node.targets
                if isinstance(target, ast.Name)
            }
            found += [f"{place}: {name} of {module}" for name in {*re.findall(r"\w+", names)} & marked]
    assert found == []


@pytest.mark.parametrize(
    ("expression", "text", "is_selected"),
    [
        ("", "pytestmark = pytest.mark.slow", True),
        ("not slow", "def test_a():\n    pass", True),
        ("not slow", "pytestmark = pytest.mark.slow  # real models", False),
        ("not slow", "pytestmark = [\n    pytest.mark.usefixtures('a'),\n    pytest.mark.slow,\n]\n", False),
        ("not slow", "@pytest.mark.slow\ndef test_a():\n    pass", True),
        ("optimized and not scale", "pytestmark = pytest.mark.slow", False),
        ("optimized and not scale", "@pytest.mark.optimized\ndef test_a():\n    pass", True),
        ("optimized and not scale", "pytestmark = [pytest.mark.optimized, pytest.mark.scale]", False),
        ("not scale and (not slow or versions)", "pytestmark = pytest.mark.slow", False),
        ("not scale and (not slow or versions)", "pytestmark = pytest.mark.slow\n@pytest.mark.versions", True),
        ("not slow and unknown", "def test_a():\n    pass", True),
        ("slow(reason='long')", "def test_a():\n    pass", True),
        ("slow and", "def test_a():\n    pass", True),
    ],
)
def test_files_without_a_selected_test_are_not_collected(expression: str, text: str, is_selected: bool) -> None:
    assert may_select(expression, text) == is_selected


def test_a_device_that_make_does_not_know_is_named_with_those_it_does() -> None:
    done = subprocess.run(["make", "-n", "serve", "DEVICE=gpu"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "DEVICE=gpu: expected cpu, cuda or tpu" in done.stderr
