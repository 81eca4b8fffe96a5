"""Files of which `-m` selects no test, found by their text: each worker of pytest imports what it collects.

A mark of a file's `pytestmark` is one of all its tests; a mark that the file does not mention is one of none of them. Marks are
set in test files only (`tests/architecture/test_lanes.py`).
"""

from __future__ import annotations

import itertools
import re

MARKS = ("aot", "exhaustive", "gpu", "newest", "optimized", "scale", "slow", "versions")
_OF_FILE = re.compile(r"^pytestmark = (\[\n.*?^\]|[^\n]*)", re.M | re.S)
_MARK = re.compile(r"\bmark\.(\w+)")
_EXPRESSION = re.compile(r"[\w\s()]+")
_WORD = re.compile(r"\w+")


def may_select(expression: str, text: str) -> bool:
    """Return False if `-m expression` selects no test of a file with this text."""
    if not _EXPRESSION.fullmatch(expression):  # none at all, or marks with arguments
        return True
    of_file = {mark for block in _OF_FILE.findall(text) for mark in _MARK.findall(block)}
    mentioned = set(_MARK.findall(text))
    choices = {
        name: (True,) if name in of_file else (False,) if name in MARKS and name not in mentioned else (True, False)
        for name in set(_WORD.findall(expression)) - {"and", "or", "not"}
    }
    try:
        condition = compile(expression.strip(), "-m", "eval")
    except SyntaxError:  # pytest says what is wrong with it
        return True
    return any(
        eval(condition, {"__builtins__": {}}, dict(zip(choices, values, strict=True)))
        for values in itertools.product(*choices.values())
    )
