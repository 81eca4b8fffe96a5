"""A request owns its counters: only its methods assign its attributes."""

from __future__ import annotations

import ast
from pathlib import Path

import jaxserve.scheduler
from jaxserve.scheduler.request import Request

SOURCES = sorted(Path(jaxserve.scheduler.__file__).parent.glob("*.py"))


def assigned(tree: ast.AST) -> list[ast.Attribute]:
    """Return the attributes that statements assign."""
    targets: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets += node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets.append(node.target)
    flat = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [target for target in flat if isinstance(target, ast.Attribute)]


def test_no_other_class_assigns_an_attribute_of_a_request_but_its_turn() -> None:
    """`FairKeys` moves requests up when others of their key end before they start."""
    names = set(Request.__slots__) - {"rank"}
    found = [
        f"{source.name}:{attribute.lineno} {ast.unparse(attribute)}"
        for source in SOURCES
        for attribute in assigned(ast.parse(source.read_text("utf-8")))
        if attribute.attr in names and ast.unparse(attribute.value) in ("request", "victim")
    ]
    assert found == []


def test_schedulers_have_at_most_fifteen_methods() -> None:
    sizes = {
        node.name: sum(isinstance(each, ast.FunctionDef) for each in node.body)
        for source in SOURCES
        for node in ast.walk(ast.parse(source.read_text("utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    assert {name: size for name, size in sizes.items() if size > 15} == {}
