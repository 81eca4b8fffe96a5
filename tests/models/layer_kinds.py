"""The checkpoints that together have every choice of architecture, for tests of what depends on layers and not on families."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import lru_cache

import msgspec

from jaxserve.models.registry import decoder_of, open_model
from tests.models.goldens import DATA, golden_names


@lru_cache
def names_of_all_choices(*, has_odd_shapes: bool = True) -> tuple[str, ...]:
    """Return names of checkpoints, few, whose configs have every value of every field that any checkpoint's config has.

    Sizes and factors count as one value, since layers treat them alike: a norm, an activation, a scaling of rope or a
    kind of mixer that a new checkpoint is the first to have brings it, or one that also has it, among these.
    has_odd_shapes: False leaves out the second shapes of families, which are of odd sizes.
    """
    choices = {
        name: frozenset(_choices(decoder_of(open_model(DATA / name)), ""))
        for name in golden_names()
        if has_odd_shapes or "_odd_" not in name
    }
    missing, names = frozenset[tuple[str, str]]().union(*choices.values()), []
    while missing:
        names.append(max(choices, key=lambda name: len(choices[name] & missing)))
        missing -= choices[names[-1]]
    return tuple(names)


def _choices(value: object, field: str) -> Iterator[tuple[str, str]]:
    """Yield the fields of a config and their values."""
    if isinstance(value, msgspec.Struct) or dataclasses.is_dataclass(value):
        is_struct = isinstance(value, msgspec.Struct)
        names = value.__struct_fields__ if is_struct else [each.name for each in dataclasses.fields(value)]
        yield field, type(value).__name__
        for name in names:
            yield from _choices(getattr(value, name), f"{field}.{name}")
    elif isinstance(value, tuple):
        for item in value:
            yield from _choices(item, field)
    else:
        yield field, "number" if type(value) in (int, float) else str(value)
