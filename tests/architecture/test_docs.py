"""The architecture page names functions and folders that exist."""

from __future__ import annotations

import ast
import re

import pytest

from tests.architecture.sources import ROOT, program

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
REFERENCES = sorted(set(re.findall(r"`([a-z_]+(?:/[a-z_]+)+)\.((?:[A-Z]\w+\.)?[a-z_]\w+)`", PAGE)))


def test_the_trace_names_functions() -> None:
    assert len(REFERENCES) >= 8


@pytest.mark.parametrize(("file", "name"), REFERENCES, ids=lambda part: part)
def test_function_of_the_trace_exists(file: str, name: str) -> None:
    if name == "py":
        assert any((root / f"{file}.py").exists() for root in (ROOT, ROOT / "jaxserve"))
        return
    (source,) = [source for source in program() if source.module == "jaxserve." + file.replace("/", ".")]
    body: list[ast.stmt] = source.tree.body
    for part in name.split("."):
        (found,) = [
            node
            for node in body
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == part
        ]
        body = found.body


def test_every_room_is_described() -> None:
    rooms = {source.module.split(".")[1] for source in program() if source.module.startswith("jaxserve.")}
    assert [room for room in sorted(rooms) if not re.search(rf"\b{room}\b", PAGE.split("## Rooms")[1])] == []


def test_readme_lists_every_architecture_that_is_served() -> None:
    families = [source for source in program() if source.module.startswith("jaxserve.models.families.")]
    served = {name for source in families for name in re.findall(r'"(\w+For\w+)"', source.path.read_text("utf-8"))}
    assert set(re.findall(r"`(\w+For\w+)`", (ROOT / "README.md").read_text("utf-8"))) == served
