"""Declares one setting of the server as a field of a frozen dataclass."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Any, Literal


def option(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    ge: float | None = None,
    le: float | None = None,
    unit: Literal["bytes", "json", "path"] | None = None,
    secret: bool = False,
    choices_from: str | None = None,
) -> Any:
    """Declare a setting: its default, its help text and its limits (`unit="bytes"` accepts `512MiB`, `unit="json"` a
    JSON object, which a setting of type `str` keeps as text, `unit="path"` a path that may begin with `~`).

    choices_from: for a setting of type `str`, the function that returns the allowed values, as "module:function". It is
    called when settings are read, and the default is allowed as well. The module must be cheap to import: no jax.
    """
    metadata = {"help": help, "ge": ge, "le": le, "unit": unit, "secret": secret, "choices_from": choices_from}
    return field(default=default, metadata=metadata)
