"""What the sources say of the fields of a struct: the text that stands below each, for people who read the API."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap

import msgspec

from jaxserve.frontend.sampling import SamplerFields
from jaxserve.sampling.params import SamplingParams

_TOLD_BY: dict[type, type] = {SamplerFields: SamplingParams}
"""Structs that are made of another's fields."""


def field_descriptions(struct: type[msgspec.Struct]) -> dict[str, str]:
    """The text of each field that has one, inherited fields among them."""
    found: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        if base is not msgspec.Struct and issubclass(base, msgspec.Struct):
            found |= _own_descriptions(_TOLD_BY.get(base, base))
    return {name: text for name, text in found.items() if name in struct.__struct_fields__}


def _own_descriptions(struct: type) -> dict[str, str]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(struct))).body
    assert isinstance(definition, ast.ClassDef), "the source of a class is a class"
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(definition.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
