"""The writing rules of the project as data: refused openings of docstrings, and words that the field does not use, in texts and names.

`python -m tests.architecture.vocabulary [PATH ...]` lists what breaks them.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

OPENINGS = re.compile(
    r"(Of|What|Whether|The same|Those|As|Whose|Who|Whom|How|That|Which|Where|Why|Such|But|Else|Behind|Likewise|And)\b"
    r"(?! if\b| long\b)"
)
"""First words of a docstring that is no statement: it makes sense only beside another text."""

WORDS = {
    "anybody": "a request, a client, any process",
    "behind": "after",
    "desk": "service",
    "dialect": "output format",
    "doorkeeper": "connection limiter",
    "fact": "property, setting, field",
    "facts": "properties, settings, fields",
    "held to": "constrained by",
    "holds it to": "constrains it to",
    "house": "code base",
    "hungry": "ready for more",
    "keeper": "supervisor",
    "matrix unit": "AMX, tensor cores, MXU",
    "matrix units": "AMX, tensor cores, MXU",
    "newcomer": "new request",
    "newcomers": "new requests",
    "news": "outputs",
    "nobody": "no request, no client, none",
    "primer": "prefill text",
    "rehearsal": "dummy run",
    "room's": "package's",
    "rooms": "packages",
    "seat": "sampler state",
    "seats": "sampler states",
    "sibling": "peer process",
    "siblings": "peer processes",
    "somebody": "a client, a process",
    "spelling": "format",
    "spellings": "formats",
    "told": "marked by, given, reported",
    "upkeep": "state programs",
    "whoever": "the client, the process that",
}
"""Refused words of running text and of names, each with the word of the field."""
NAME_WORDS = WORDS | {"product": "matmul", "products": "matmuls"}
"""Refused words of names. In texts, numbers have products."""
FIELD_NAMES = {"behind_proxy", "dot_product_attention", "scaled_dot_product_attention"}
"""Names that have such a word in the sense of the field."""
FIELD_MEMBERS = {("itertools", ".", "product")}

_WORDS = re.compile(r"(?<![\w/`-])(" + "|".join(sorted(WORDS, key=len, reverse=True)) + r")(?![\w`-]|\.\w)", re.I)
_IN_NAMES = re.compile(r"(?<![a-z])(" + "|".join(word for word in NAME_WORDS if word.isalpha()) + r")(?![a-z])", re.I)
_MAY_OPEN = re.compile(r"""["'][\s\\]*""" + OPENINGS.pattern)
"""Found in every file that has a docstring with a refused opening; most files need not be parsed."""
_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_CODE = re.compile(r"```.*?^```|`[^`\n]*`|\]\([^)]*\)", re.S | re.M)


def python_files() -> list[Path]:
    """Every Python file of the project: the program, its kernels, its tests and its benchmarks."""
    folders = ("jaxserve", "kernels", "tests", "benchmarks")
    own = {Path(__file__).resolve(), Path(__file__).with_name("test_vocabulary.py").resolve()}
    return sorted(path for name in folders for path in (ROOT / name).rglob("*.py") if path.resolve() not in own)


def pages() -> list[Path]:
    """Every page of documentation."""
    found = [
        path
        for pattern in ("*.md", "docs/**/*.md", "kernels/**/*.md", "benchmarks/**/*.md")
        for path in ROOT.glob(pattern)
    ]
    return sorted(path for path in found if ".venv" not in path.parts)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring: of modules, classes, functions, and of fields below their assignment."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        is_documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        previous: ast.stmt | None = None
        for statement in body:
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            follows = isinstance(previous, ast.Assign | ast.AnnAssign) or (previous is None and is_documented)
            if is_text and follows and isinstance(statement.value.value, str):
                yield statement.lineno, statement.value.value.strip()
            previous = statement


def descriptions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of every `help=` and `description=` of a call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                value = keyword.value
                if (
                    keyword.arg in ("help", "description")
                    and isinstance(value, ast.Constant)
                    and isinstance(value.value, str)
                ):
                    yield value.lineno, value.value


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of every comment."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def refused_openings(path: Path) -> list[str]:
    """Return `file:line text` of docstrings that begin with a refused opening."""
    source = path.read_text("utf-8")
    if _MAY_OPEN.search(source) is None:
        return []
    tree = ast.parse(source)
    return [
        f"{place(path)}:{line} {text.splitlines()[0][:80]}" for line, text in docstrings(tree) if OPENINGS.match(text)
    ]


def refused_words(path: Path) -> list[str]:
    """Return `file:line word -> better` of refused words in docstrings, comments and descriptions, or in a page."""
    text = path.read_text("utf-8")
    if not _has_any(WORDS, text) or _WORDS.search(text) is None:  # most files: nothing to parse
        return []
    if path.suffix == ".md":
        blank = _CODE.sub(lambda found: "\n" * found.group().count("\n") + " ", text)
        texts = list(enumerate(blank.splitlines(), 1))
    else:
        tree = ast.parse(text)
        texts = [*docstrings(tree), *descriptions(tree), *comments(text)]
    return [
        f"{place(path)}:{line} {word} -> {WORDS[word.lower()]}"
        for line, part in texts
        for word in _WORDS.findall(_CODE.sub(" ", part))
    ]


def refused_names(path: Path) -> list[str]:
    """Return `file:line name -> better` of names in a Python file with a refused word among their words."""
    text = path.read_text("utf-8")
    if (
        not _has_any(NAME_WORDS, text) or _IN_NAMES.search(_CAPITAL.sub("_", text)) is None
    ):  # most files: no tokens to read
        return []
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    names = [token.string for token in tokens]
    return [
        f"{place(path)}:{token.start[0]} {token.string} -> {NAME_WORDS[word.lower()]}"
        for i, token in enumerate(tokens)
        if token.type == tokenize.NAME
        and token.string not in FIELD_NAMES
        and tuple(names[max(i - 2, 0) : i + 1]) not in FIELD_MEMBERS
        for word in _IN_NAMES.findall(_CAPITAL.sub("_", token.string))
    ]


def _has_any(words: Iterable[str], text: str) -> bool:
    """Return True if any of `words` is somewhere in `text`, also as a part of another: a tenth of the time of the patterns."""
    lower = text.lower()
    return any(word in lower for word in words)


def place(path: Path) -> str:
    """Return the path from the project's root."""
    return str(path.relative_to(ROOT))


def main(arguments: list[str]) -> None:
    """Print every fault below the given paths, or everywhere."""
    chosen = [Path(argument).resolve() for argument in arguments]
    for path in [*python_files(), *pages()]:
        if chosen and not any(path.is_relative_to(folder) for folder in chosen):
            continue
        faults = refused_words(path)
        if path.suffix == ".py":
            faults += refused_openings(path) + refused_names(path)
        print("\n".join(sorted(faults)), end="\n" * bool(faults))


if __name__ == "__main__":
    main(sys.argv[1:])
