"""Finds formats: every module of `formats/` is one, found by scanning. A new format is a new file there."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any, Final

from jaxserve.quant import formats
from jaxserve.quant.checkpoint import (
    COMPRESSED_TENSORS,
    INSTEAD,
    CheckpointForm,
    CheckpointForms,
    unsupported,
    unsupported_weights,
)
from jaxserve.quant.format import Format
from jaxserve.quant.kv_scales import has_only_kv_scales
from jaxserve.quant.names import format_modules

_EXPERTS: Final = "expert_dtype"


@cache
def find_format(name: str) -> Format:
    """Return the format of this name, one of `format_names()`."""
    found: Format = import_module(f"{formats.__name__}.{name.replace('-', '_')}").FORMAT
    if found.name != name:
        raise RuntimeError(f"the module of format {name} holds one called {found.name}")
    return found


def read_form(config: Mapping[str, Any]) -> CheckpointForm | None:
    """Return how the checkpoint of a `config.json` is quantised, or None if it is not.

    Raises CheckpointError for a form that no format reads.
    """
    found = config.get("quantization_config")
    if found is None:
        return None
    if not isinstance(found, dict):
        raise unsupported("", found, INSTEAD)
    if has_only_kv_scales(found):
        return None
    if config.get(_EXPERTS) is not None:  # DeepSeek-V4 has it beside the table
        found = {_EXPERTS: config[_EXPERTS], **found}
    known = _checkpoint_forms()
    for forms in known:
        form = forms.read(found)
        if form is not None:
            return form
    method, compressed = found.get("quant_method"), [forms.compressed for forms in known if forms.compressed]
    if method == COMPRESSED_TENSORS:
        raise unsupported_weights(found, ", ".join((*compressed, INSTEAD)))
    methods = ", ".join(method for forms in known for method in forms.methods)
    supported = f"{methods}, {COMPRESSED_TENSORS} with {' or '.join(compressed)}, {INSTEAD}"
    raise unsupported(".quant_method", method, supported)


def _checkpoint_forms() -> tuple[CheckpointForms, ...]:
    modules = (import_module(f"{formats.__name__}.{name}") for name in format_modules())
    return tuple(module.CHECKPOINTS for module in modules if hasattr(module, "CHECKPOINTS"))
