"""Reads `quantization_config` of checkpoints in 4 bits; raises CheckpointError for what is not read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.checkpoint.compressed import only_scheme
from jaxserve.checkpoint.int4 import StoredInt4
from jaxserve.checkpoint.refusal import INSTEAD, refusal


def read_gptq(found: Mapping[str, Any]) -> StoredInt4:
    """GPTQ's own; `checkpoint_format` `gptq` (zeros are stored less 1) or `gptq_v2`."""
    _expect(found, "bits", (4,), None)
    layout = _expect(found, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    is_symmetric = _expect(found, "sym", (True, False), True)
    is_ordered = _expect(found, "desc_act", (True, False), False)
    if found.get("dynamic"):
        raise refusal(".dynamic", found["dynamic"], "one format for all modules")
    size = _group_size("group_size", found.get("group_size", -1))
    return StoredInt4(
        "gptq",
        size,
        has_zeros=not is_symmetric,
        is_ordered=bool(is_ordered) and size is not None,
        zero_shift=1 if layout == "gptq" else 0,
    )


def read_awq(found: Mapping[str, Any]) -> StoredInt4:
    """AutoAWQ's, `version` `gemm`."""
    _expect(found, "bits", (4,), None)
    _expect(found, "version", ("gemm", "GEMM"), "gemm")
    _expect(found, "zero_point", (True,), True)
    return StoredInt4("awq", _group_size("group_size", found.get("group_size", -1)), has_zeros=True)


def read_pack_quantized(found: Mapping[str, Any]) -> StoredInt4:
    """compressed-tensors with `format` `pack-quantized`; all groups of modules alike."""
    return only_scheme(found, _of_group)


def _of_group(where: str, group: Mapping[str, Any]) -> StoredInt4:
    weights, activations = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, dict) or (weights.get("num_bits"), weights.get("type", "int")) != (4, "int"):
        raise refusal(f"{where}.weights", weights, f"integers of 4 bits, {INSTEAD}")
    if activations is not None:
        raise refusal(f"{where}.input_activations", activations, "none")
    key = f"config_groups {where.rpartition('.')[2]} weights"
    strategy = _expect(weights, "strategy", ("group", "channel"), None, key)
    is_symmetric = _expect(weights, "symmetric", (True, False), True, key)
    order = _expect(weights, "actorder", (None, False, "weight", "static", True, "group", "dynamic"), None, key)
    size = _group_size(f"{key} group_size", weights.get("group_size")) if strategy == "group" else None
    return StoredInt4(
        "compressed-tensors",
        size,
        has_zeros=not is_symmetric,
        is_ordered=order in (True, "group", "dynamic") and size is not None,
    )


def _expect(table: Mapping[str, Any], key: str, supported: tuple[Any, ...], default: Any, where: str = "") -> Any:
    value = table.get(key, default)
    if not any(value is known or (value == known and type(value) is type(known)) for known in supported):
        raise refusal(f".{where} {key}" if where else f".{key}", value, ", ".join(map(str, supported)))
    return value


def _group_size(key: str, value: object) -> int | None:
    """None: all inputs of an output."""
    if value in (-1, None):
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value > 0 and value % 32 == 0:
        return value
    raise refusal(f".{key}", value, "-1 and multiples of 32")
