"""`quantization_config` of checkpoints in 4 bits: GPTQ, AWQ, compressed-tensors. Raises CheckpointError for other values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from jaxserve.quant.checkpoint import COMPRESSED_TENSORS, INSTEAD, only_scheme, unsupported

_LAYOUT_KEYS: Final[Mapping[str, object]] = {"bits": None, "group_size": -1, "sym": True, "desc_act": False}
"""Keys of GPTQ that decide how matrices are stored, with their defaults."""


@dataclass(frozen=True, slots=True)
class Int4Layout:
    """Layout of the tensors of a 4-bit matrix: see `_int4_tensors`."""

    method: Literal["compressed-tensors", "gptq", "awq"]
    group_size: int | None
    """Inputs of a group; None: all."""
    has_zeros: bool
    """True if zeros may differ from 8."""
    is_ordered: bool = False
    """True if groups are not of neighbouring inputs (act-order, `desc_act`)."""
    zero_shift: int = 0
    """Subtracted from zeros before they were stored."""

    @property
    def suffix(self) -> str:
        """End of the name of a module's numbers."""
        return ".weight_packed" if self.method == COMPRESSED_TENSORS else ".qweight"


def read_config(found: Mapping[str, Any]) -> Int4Layout | None:
    """Return the layout of a checkpoint in 4 bits; None for other checkpoints."""
    match found.get("quant_method"):
        case "gptq":
            return _read_gptq(found)
        case "awq":
            return _read_awq(found)
        case method if method == COMPRESSED_TENSORS and found.get("format") == "pack-quantized":
            return only_scheme(found, _read_group)
    return None


def _read_gptq(found: Mapping[str, Any]) -> Int4Layout:
    """Read GPTQ's layout, whose `checkpoint_format` is `gptq` (zeros are stored less 1) or `gptq_v2`."""
    _expect(found, "bits", (4,), None)
    version = _expect(found, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    is_symmetric = _expect(found, "sym", (True, False), True)
    is_ordered = _expect(found, "desc_act", (True, False), False)
    _check_rules(found)
    size = _group_size("group_size", found.get("group_size", -1))
    return Int4Layout(
        "gptq",
        size,
        has_zeros=not is_symmetric,
        is_ordered=bool(is_ordered) and size is not None,
        zero_shift=1 if version == "gptq" else 0,
    )


def _check_rules(found: Mapping[str, Any]) -> None:
    """Raise CheckpointError if `dynamic` gives some modules another layout. Rules that leave modules out (`-:`) change none: the
    tensors tell."""
    rules = found.get("dynamic") or {}
    if not isinstance(rules, dict):
        raise unsupported(".dynamic", rules, "a table of rules")
    whole = {**_LAYOUT_KEYS, **found}
    for pattern, changes in rules.items():
        own = changes if isinstance(changes, dict) else {}
        if not pattern.startswith("-:") and any(own.get(key, whole[key]) != whole[key] for key in _LAYOUT_KEYS):
            raise unsupported(
                f".dynamic {pattern!r}", changes, f"rules that leave {', '.join(_LAYOUT_KEYS)} as they are"
            )


def _read_awq(found: Mapping[str, Any]) -> Int4Layout:
    _expect(found, "bits", (4,), None)
    _expect(found, "version", ("gemm", "GEMM"), "gemm")
    _expect(found, "zero_point", (True,), True)
    return Int4Layout("awq", _group_size("group_size", found.get("group_size", -1)), has_zeros=True)


def _read_group(where: str, group: Mapping[str, Any]) -> Int4Layout:
    weights, activations = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, dict) or (weights.get("num_bits"), weights.get("type", "int")) != (4, "int"):
        raise unsupported(f"{where}.weights", weights, f"integers of 4 bits, {INSTEAD}")
    if activations is not None:
        raise unsupported(f"{where}.input_activations", activations, "none")
    key = f"config_groups {where.rpartition('.')[2]} weights"
    strategy = _expect(weights, "strategy", ("group", "channel"), None, key)
    is_symmetric = _expect(weights, "symmetric", (True, False), True, key)
    order = _expect(weights, "actorder", (None, False, "weight", "static", True, "group", "dynamic"), None, key)
    size = _group_size(f"{key} group_size", weights.get("group_size")) if strategy == "group" else None
    return Int4Layout(
        "compressed-tensors",
        size,
        has_zeros=not is_symmetric,
        is_ordered=order in (True, "group", "dynamic") and size is not None,
    )


def _expect(table: Mapping[str, Any], key: str, supported: tuple[Any, ...], default: Any, where: str = "") -> Any:
    value = table.get(key, default)
    if not any(value is known or (value == known and type(value) is type(known)) for known in supported):
        raise unsupported(f".{where} {key}" if where else f".{key}", value, ", ".join(map(str, supported)))
    return value


def _group_size(key: str, value: object) -> int | None:
    """Return the inputs of a group; None: all inputs of an output."""
    if value in (-1, None):
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value > 0 and value % 32 == 0:
        return value
    raise unsupported(f".{key}", value, "-1 and multiples of 32")
