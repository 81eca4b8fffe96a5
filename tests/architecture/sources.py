"""The program's sources as data: which module imports what, parsed and never executed."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {"jaxserve": ROOT / "jaxserve", "jaxserve_kernels": ROOT / "kernels" / "jaxserve_kernels"}


@dataclass(frozen=True)
class Source:
    """One Python file of the program."""

    module: str
    path: Path
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        """Parsed when a test asks for it: every worker imports all tests."""
        return ast.parse(self.text, str(self.path))

    @functools.cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of the tree, breadth first: several tests look at all of them."""
        return tuple(ast.walk(self.tree))

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def place(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def package(self) -> str:
        """The package that relative imports of this module start from."""
        return self.module if self.path.name == "__init__.py" else self.module.rpartition(".")[0]

    def imports(self) -> tuple[tuple[int, str], ...]:
        """(line, module) of every import, wherever it stands; `from a import b` gives `a.b` where b is a module."""
        return self._imports

    @functools.cached_property
    def _imports(self) -> tuple[tuple[int, str], ...]:
        return tuple(self._find_imports())

    def _find_imports(self) -> Iterator[tuple[int, str]]:
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parents = self.package.split(".")[: len(self.package.split(".")) - node.level + 1]
                    base = ".".join([*parents, base] if base else parents)
                for alias in node.names:
                    inner = f"{base}.{alias.name}"
                    yield node.lineno, inner if inner in module_names() else base

    def dotted_names(self) -> tuple[tuple[int, str], ...]:
        """(line, dotted name) of every attribute chain: `jax.jit`, `os.environ.get`; `().name` if it begins with no name."""
        return self._dotted_names

    @functools.cached_property
    def _dotted_names(self) -> tuple[tuple[int, str], ...]:
        return tuple((node.lineno, _dotted(node)) for node in self.nodes if isinstance(node, ast.Attribute))

    def functions(self) -> Iterator[tuple[str, int, int]]:
        """(name, line, number of lines) of every function."""
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1


@functools.cache
def module_names() -> frozenset[str]:
    return frozenset(_module_name(name, path) for name, root in PACKAGES.items() for path in root.rglob("*.py"))


@functools.cache
def program() -> tuple[Source, ...]:
    """Every source file of both packages, sorted by module name."""
    found = (
        Source(_module_name(name, path), path, path.read_text(encoding="utf-8"))
        for name, root in PACKAGES.items()
        for path in root.rglob("*.py")
    )
    return tuple(sorted(found, key=lambda source: source.module))


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "()"


def _module_name(package: str, path: Path) -> str:
    parts = path.relative_to(PACKAGES[package]).with_suffix("").parts
    return ".".join([package, *(part for part in parts if part != "__init__")])
