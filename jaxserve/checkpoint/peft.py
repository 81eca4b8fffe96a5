"""A LoRA adapter as PEFT saves it: adapter_config.json and adapter_model.safetensors. Nothing in it is executed."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from jaxserve.checkpoint.files import read_object
from jaxserve.checkpoint.renamed import text_name
from jaxserve.checkpoint.safetensors_file import SafetensorsFile, open_safetensors
from jaxserve.errors import CheckpointError, shown

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
MAX_RANK: Final = 512

_ADAPTABLE: Final = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
"""Modules that adapters may change: neither the vocabulary's matrices nor routers."""
_PREFIX: Final = "base_model.model."
_EXPERTS: Final = "experts"
_TENSOR: Final = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_NEEDED: Final[Mapping[str, tuple[Any, ...]]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
}
"""Values under which a module gets `scale` * B @ A added and nothing else changes. Only the first key is required."""
_OTHER_BASES: Final = ("pissa", "olora", "corda", "loftq")
"""Initialisations that change the model's own weights as well."""


@dataclass(frozen=True, slots=True)
class Addition:
    """Update of one module: scale * up[rows] @ down is added to its weight."""

    down: str
    """Name of matrix A in the file, [rank, in]."""
    up: str
    """Name of matrix B, [out, rank]."""
    rows: slice
    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """An opened adapter, of which only the header was read."""

    name: str
    file: SafetensorsFile
    additions: Mapping[str, Addition]
    """Updates by module name in the model's checkpoint, such as `model.layers.0.self_attn.q_proj`."""

    @property
    def rank(self) -> int:
        """Largest rank of its modules."""
        return max(addition.rank for addition in self.additions.values())


Parts = Mapping[str, Mapping[str, int]]
"""Modules that some implementations fuse, with the rows of each part."""


def open_adapter(name: str, path: Path, parts: Parts) -> Adapter:
    """Open the adapter in a folder. parts: modules that the adapter may have fused, and their parts in the model.

    Raises CheckpointError naming the key or the tensor that is not supported.
    """
    if not (path / CONFIG_FILE).is_file() or not (path / WEIGHTS_FILE).is_file():
        raise CheckpointError(f"adapter {shown(name)}: {path}: expected a folder with {CONFIG_FILE} and {WEIGHTS_FILE}")
    config = read_object(path / CONFIG_FILE)
    _check_config(path / CONFIG_FILE, config)
    file = open_safetensors(path / WEIGHTS_FILE)
    additions: dict[str, Addition] = {}
    for module, sides in _pairs(file).items():
        additions |= _additions(file, config, module, sides, parts)
    if not additions:
        raise CheckpointError(f"{file.path}: expected tensors `...lora_A.weight` and `...lora_B.weight`, found none")
    return Adapter(name, file, additions)


def _check_config(path: Path, config: Mapping[str, Any]) -> None:
    for key, allowed in _NEEDED.items():
        if config.get(key) not in allowed:
            raise CheckpointError(
                f"{path}: key {key!r}: supported: {allowed[0]!r}, found {shown(str(config.get(key)))}"
            )
    begin = config.get("init_lora_weights")
    if isinstance(begin, str) and begin.startswith(_OTHER_BASES):
        raise CheckpointError(
            f"{path}: key 'init_lora_weights': {shown(begin)} changes the model's weights as well; "
            "save the adapter converted to plain LoRA"
        )


def _pairs(file: SafetensorsFile) -> dict[str, dict[str, str]]:
    """Return the two tensors of each module, by "A" and "B"."""
    pairs: dict[str, dict[str, str]] = {}
    for tensor in file.tensors:
        match = _TENSOR.fullmatch(tensor.removeprefix(_PREFIX))
        module = text_name(match["module"]) if match else None
        if match is None or module is None:
            _fail(file, tensor, "to be lora_A.weight or lora_B.weight of a module of the language model", "another")
        pairs.setdefault(module, {})[match["side"]] = tensor
    for sides in pairs.values():
        if len(sides) != 2:
            _fail(file, next(iter(sides.values())), "the other matrix of its module beside it", "none")
    return pairs


def _additions(
    file: SafetensorsFile, config: Mapping[str, Any], module: str, sides: Mapping[str, str], joined: Parts
) -> dict[str, Addition]:
    """Return the update of each of our modules that the adapter's module covers."""
    down, up = (file.tensors[sides[side]] for side in "AB")
    rank = down.shape[0] if len(down.shape) == 2 else 0
    if not 1 <= rank <= MAX_RANK:
        _fail(file, down.name, f"two dimensions, the first from 1 to {MAX_RANK}", str(down.shape))
    if len(up.shape) != 2 or up.shape[1] != rank:
        _fail(file, up.name, f"two dimensions, the second {rank}", str(up.shape))
    scale = _alpha(file, config, module) / (math.sqrt(rank) if config.get("use_rslora") else rank)
    above, _, own = module.rpartition(".")
    if _EXPERTS in module.split("."):
        _fail(file, down.name, "to belong to a module that every token uses: adapters of experts are not served", own)
    parts = joined.get(own, {own: up.shape[0]})
    if not _ADAPTABLE.issuperset(parts):
        _fail(file, down.name, f"to belong to one of {', '.join(sorted(_ADAPTABLE.union(joined)))}", own)
    ends = list(itertools.accumulate(parts.values(), initial=0))
    if ends[-1] != up.shape[0]:
        _fail(file, up.name, f"{ends[-1]} rows", str(up.shape[0]))
    return {
        f"{above}.{part}": Addition(down.name, up.name, slice(start, end), rank, scale)
        for part, (start, end) in zip(parts, itertools.pairwise(ends), strict=True)
    }


def _alpha(file: SafetensorsFile, config: Mapping[str, Any], module: str) -> float:
    path, patterns = file.path.with_name(CONFIG_FILE), config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(f"{path}: key 'alpha_pattern': expected an object, found {shown(str(patterns))}")
    own = (value for key, value in patterns.items() if _matches(key, module))
    alpha = next(own, config.get("lora_alpha", 8))
    if type(alpha) not in (int, float) or not math.isfinite(alpha):
        raise CheckpointError(f"{path}: key 'lora_alpha': expected a number, found {shown(str(alpha))}")
    return float(alpha)


def _matches(pattern: str, module: str) -> bool:
    """Match the end of the name with a regular expression, as PEFT does."""
    try:
        return re.fullmatch(rf"(.*\.)?({pattern})", module) is not None
    except re.error:
        return False


def _fail(file: SafetensorsFile, tensor: str, expected: str, found: str) -> NoReturn:
    raise CheckpointError(f"{file.path}: tensor {shown(tensor)}: expected {expected}, found {found}")
