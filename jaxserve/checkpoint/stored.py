"""What a checkpoint's `quantization_config` says: which of the formats that are read it is stored in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from jaxserve.checkpoint.fp8 import FP8, StoredFp8, read_compressed_fp8, read_fp8, with_scales
from jaxserve.checkpoint.int4 import StoredInt4, with_groups
from jaxserve.checkpoint.int4_config import read_awq, read_gptq, read_pack_quantized
from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.checkpoint.refusal import INSTEAD, refusal
from jaxserve.checkpoint.stacked import StoredMxfp4
from jaxserve.errors import CheckpointError

Stored = StoredFp8 | StoredInt4 | StoredMxfp4
_PACKED: Final = ("I32", "U32")


def read_stored(config: Mapping[str, Any]) -> Stored | None:
    """None where nothing is quantised. Raises CheckpointError for every format that is not read."""
    found = config.get("quantization_config")
    if found is None:
        return None
    if not isinstance(found, dict):
        raise refusal("", found, INSTEAD)
    match found.get("quant_method"):
        case "fp8":
            return read_fp8(found)
        case "gptq":
            return read_gptq(found)
        case "awq":
            return read_awq(found)
        case "mxfp4":
            return StoredMxfp4()
        case "compressed-tensors" if found.get("format") == "pack-quantized":
            return read_pack_quantized(found)
        case "compressed-tensors":
            return read_compressed_fp8(found)
    supported = f"fp8, gptq, awq, mxfp4, compressed-tensors with 8-bit floats or 4-bit integers, {INSTEAD}"
    raise refusal(".quant_method", found.get("quant_method"), supported)


def as_stored(checkpoint: Checkpoint) -> Checkpoint:
    """The same, with what is quantised and its scales brought together; unchanged where nothing is.

    Raises CheckpointError in one line where a scale is missing or has another shape.
    """
    kinds = {info.stored_dtype for info in checkpoint.tensors.values()}
    if FP8 not in kinds and kinds.isdisjoint(_PACKED):
        return checkpoint
    stored = read_stored(checkpoint.config)
    match stored:
        case StoredInt4():
            return with_groups(checkpoint, stored)
        case StoredFp8() if FP8 in kinds:
            return with_scales(checkpoint, stored)
    if FP8 in kinds:
        raise CheckpointError(f"{checkpoint.path}: {FP8} tensors, but no quantization_config that says what they are")
    return checkpoint
