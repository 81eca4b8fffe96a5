"""Sizes of files and functions, and what does not belong into sources."""

from __future__ import annotations

import ast
import re
import warnings
from collections import Counter

import pytest

from tests.architecture.sources import program

MAX_FILE_LINES = 400
GOOD_FUNCTION_LINES = 60
MAX_FUNCTION_LINES = 100
MAX_MODULES = 20
MAX_METHODS = 15
FAMILIES = "jaxserve.models.families"
"""The package that grows by a module for each family."""
SOURCES = [source for source in program() if source.module.startswith("jaxserve.")]


class LongFunctionWarning(UserWarning):
    """A function is longer than it should be."""


STAMPS = {
    "jaxserve.apis.openai.classify",
    "jaxserve.apis.openai.score",
    "jaxserve.apis.responses.endpoint",
    "jaxserve.apis.responses.reply",
    "jaxserve.apis.schema.common",
    "jaxserve.flight.dump",
    "jaxserve.frontend.frontend",
    "jaxserve.http.rejections",
    "jaxserve.metrics",
    "jaxserve.tokenizer.template",
}
"""Modules that read the time of day: for `created` and the like, for metrics, records, and the date in a chat template."""


def test_no_file_is_too_long() -> None:
    """Kernels are exempt: a Pallas kernel is one thought."""
    assert [f"{s.place}: {s.num_lines} lines" for s in SOURCES if s.num_lines > MAX_FILE_LINES] == []


@pytest.mark.filterwarnings("default::tests.architecture.test_shape.LongFunctionWarning")
def test_no_function_is_too_long() -> None:
    sized = [(f"{s.place}:{line} {name}", size) for s in SOURCES for name, line, size in s.functions()]
    for place, size in sized:
        if GOOD_FUNCTION_LINES < size <= MAX_FUNCTION_LINES:
            warnings.warn(f"{place}: {size} lines, {GOOD_FUNCTION_LINES} is the aim", LongFunctionWarning, stacklevel=1)
    assert [f"{place}: {size} lines" for place, size in sized if size > MAX_FUNCTION_LINES] == []


def test_no_package_has_too_many_modules() -> None:
    sizes = Counter(source.package for source in SOURCES)
    assert {name: size for name, size in sizes.items() if size > MAX_MODULES and name != FAMILIES} == {}


def test_no_class_has_too_many_methods() -> None:
    def num_methods(node: ast.ClassDef) -> int:
        return sum(isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) for statement in node.body)

    classes = [(s.place, node) for s in SOURCES for node in s.nodes if isinstance(node, ast.ClassDef)]
    assert [f"{place} {node.name}" for place, node in classes if num_methods(node) > MAX_METHODS] == []


def test_every_module_says_what_it_owns() -> None:
    bare = [s.place for s in program() if s.tree.body and ast.get_docstring(s.tree) is None]
    assert bare == []


def test_nothing_is_left_open() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX)\b|raise NotImplementedError")
    assert [
        f"{s.place}:{number}"
        for s in program()
        for number, line in enumerate(s.text.splitlines(), start=1)
        if marks.search(line)
    ] == []


def test_only_stamps_are_read_from_a_clock_that_may_jump() -> None:
    """Time-outs, ages and rates are of `time.monotonic` and the event loop: a jump of the system's clock ends no request."""
    readers = {
        source.module
        for source in program()
        for _, name in source.dotted_names()
        if name in ("time.time", "datetime.now", "datetime.utcnow")
    }
    assert readers == STAMPS
