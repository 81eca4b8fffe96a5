"""The part of the source that invalidates cached programs: what the step functions import, without its comments."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import jaxserve
from jaxserve.runner import program_key as module
from jaxserve.runner.program_key import STEPS, traced_files, without_comments
from tests.architecture.sources import program

ROOT = Path(jaxserve.__file__).parent


def test_packages_of_the_model_are_traced_and_those_of_the_server_are_not() -> None:
    names = {file.relative_to(ROOT).parts[0] for file in traced_files(ROOT)}
    assert names >= {"layers", "models", "runner", "sampling", "sharding", "model_config", "types.py"}
    assert ROOT / "runner/kv_scales/step.py" in traced_files(ROOT)
    assert not names & {"http", "apis", "frontend", "cli", "runtime", "tools", "llm", "engine", "kv", "tokenizer"}


def test_traced_files_are_those_that_the_parsed_imports_reach() -> None:
    """The regular expression for imports finds as much as Python's parser."""
    sources = {source.module: source for source in program()}
    waiting = [f"jaxserve.{name.removesuffix('.py').replace('/', '.')}" for name in STEPS]
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in found and name in sources and name.startswith("jaxserve."):
            found.add(name)
            waiting += [imported for _, imported in sources[name].imports()]
    assert {sources[name].path for name in found} <= traced_files(ROOT)


@pytest.mark.slow
def test_removing_comments_leaves_the_program() -> None:
    """An edit could otherwise keep the key of a program that it changes."""
    traced = traced_files(ROOT)
    for source in program():
        if source.path in traced or source.module.startswith("jaxserve_kernels"):
            stripped = ast.parse(without_comments(source.path.read_bytes()))
            assert ast.dump(stripped) == ast.dump(WithoutDocstrings().visit(ast.parse(source.path.read_bytes()))), (
                source.place
            )


class WithoutDocstrings(ast.NodeTransformer):
    """Replaces strings that are statements by `...`."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return ast.Expr(ast.Constant(...)) if is_text else node


def test_an_edit_of_traced_code_is_another_hash_and_one_of_the_server_or_a_comment_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(place: str, text: str) -> None:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(text)

    for package in ("jaxserve", "jaxserve_kernels"):
        write(f"{package}/__init__.py", "")
        monkeypatch.setattr(getattr(module, package), "__file__", str(tmp_path / package / "__init__.py"))
    write(
        "jaxserve/runner/steps.py",
        "from jaxserve.layers import (\n    linear,\n)\nfrom jaxserve.quant.registry import find\n",
    )
    write("jaxserve/quant/registry.py", "import pkgutil\n")
    write("jaxserve/quant/int3.py", "BITS = 3\n")
    write("jaxserve/layers/linear.py", '"""Old."""\nx = 1  # old\n')
    write("jaxserve/http/app.py", "old = 1\n")
    write("jaxserve_kernels/matmul/api.py", "old = 1\n")
    hashes = [module.source_hash.__wrapped__()]
    for place, text in (
        ("jaxserve/http/app.py", "new = 1\n"),
        ("jaxserve/layers/linear.py", '"""New."""\n# New.\n\nx = 1  # new\n'),
        ("jaxserve/layers/linear.py", "x = 2\n"),
        ("jaxserve/quant/int3.py", "BITS = 4\n"),
        ("jaxserve_kernels/matmul/api.py", "new = 1\n"),
    ):
        write(place, text)
        hashes.append(module.source_hash.__wrapped__())
    assert hashes[0] == hashes[1] == hashes[2]
    assert len(set(hashes[2:])) == 4
