"""What the sources say of the fields of a struct: the text that stands below each, for people who read the API."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from typing import get_type_hints

import msgspec
from msgspec import Meta

from jaxserve.frontend.sampling import SamplerFields


def field_descriptions(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return the text of each field that has one, inherited fields included."""
    hints = get_type_hints(struct, include_extras=True)
    metas = {name: [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Meta)]
             for name, hint in hints.items()}  # fmt: skip
    found = {name: meta.description for name, extras in metas.items() for meta in extras if meta.description}
    for base in reversed(struct.__mro__):
        if base not in (msgspec.Struct, SamplerFields) and issubclass(base, msgspec.Struct):
            found |= _own_descriptions(base)
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
