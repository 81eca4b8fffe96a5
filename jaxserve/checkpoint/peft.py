"""A LoRA adapter as PEFT saves it: adapter_config.json and adapter_model.safetensors. Nothing in it is executed."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from jaxserve.checkpoint.files import read_object
from jaxserve.checkpoint.peft_modules import (
    Addition,
    TargetExperts,
    TargetModel,
    each_expert,
    factor,
    is_exchanged,
    widths,
)
from jaxserve.checkpoint.qkv import num_rows
from jaxserve.checkpoint.renamed import text_name
from jaxserve.checkpoint.safetensors_file import SafetensorsFile, open_safetensors
from jaxserve.errors import CheckpointError, shown

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
MAX_RANK: Final = 512
_OTHER_FILES: Final = {
    "adapter_model.bin": "pickle files can run code: save it as safetensors",
    "adapters.safetensors": "MLX-LM's names: convert it to PEFT's",
}
"""Files that adapters may have instead, and advice."""

_ADAPTABLE: Final = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
"""Modules that adapters may change in every model, besides `TargetModel.recurrent`: neither the vocabulary's matrices nor
routers."""
_PREFIX: Final = "base_model.model."
_STACKED: Final = re.compile(r"(?P<experts>.+\.experts)(\.(?P<parameter>gate_up_proj|down_proj))?")
"""Our names of modules and parameters that hold the matrices of all experts."""
_NESTED: Final = ".base_layer"
"""Suffix of a module of which PEFT adapts several parameters, for all of them but the last."""
_TENSOR: Final = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_MAX_NAME: Final = 256
"""Characters of a tensor's name, and of a pattern."""
_MAX_REPEATS: Final = 3
_COSTLY: Final = re.compile(r"\)[*+{]|" + r"(?:[*+}]|(?<!\()\?)[^*+}]*?" * (_MAX_REPEATS + 1))
"""Regular expressions of adapters that may take seconds, or forever, to match a name: the interpreter does nothing else meanwhile."""
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
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "monteclora_config": (None,),
}
"""Values under which a module gets `scale` * B @ A added and nothing else changes. Only the first key is required."""
_OTHER_BASES: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that change the model's own weights as well."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An opened adapter."""

    name: str
    config: Mapping[str, Any]
    """`adapter_config.json`"""
    file: SafetensorsFile
    additions: Mapping[str, Addition]
    """Updates by module name in the model's checkpoint, such as `model.layers.0.self_attn.q_proj`; each expert has its own."""

    @property
    def rank(self) -> int:
        """Largest rank of its modules."""
        return max(addition.rank for addition in self.additions.values())


def open_adapter(name: str, path: Path, target: TargetModel, *, in_memory: bool = False) -> Adapter:
    """Open the adapter of `target` in a folder. Raises CheckpointError naming the key or the tensor that is not supported.

    in_memory: read all tensors now, so that the folder may change or vanish; else only the header is read.
    """
    try:
        return _open(name, path, target, in_memory=in_memory)
    except CheckpointError as error:
        raise CheckpointError(f"adapter {shown(name)}: {error}") from error


def _open(name: str, path: Path, target: TargetModel, *, in_memory: bool) -> Adapter:
    try:
        files = set(os.listdir(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if not files >= {CONFIG_FILE, WEIGHTS_FILE}:
        other = "".join(f"; {name} is not read ({why})" for name, why in _OTHER_FILES.items() if name in files)
        raise CheckpointError(f"{path}: expected a folder with {CONFIG_FILE} and {WEIGHTS_FILE}{other}")
    config = read_object(path / CONFIG_FILE)
    _check_config(path / CONFIG_FILE, config, is_transposed=target.is_transposed)
    file = open_safetensors(path / WEIGHTS_FILE, in_memory=in_memory)
    additions: dict[str, Addition] = {}
    for module, sides in _pairs(file).items():
        found = _additions(file, config, module, sides, target)
        if both := additions.keys() & found.keys():
            _fail(file, sides["A"], "one pair of matrices for each module", f"two for {min(both)}")
        additions |= found
    if not additions:
        raise CheckpointError(f"{file.path}: expected tensors `...lora_A.weight` and `...lora_B.weight`, found none")
    return Adapter(name, config, file, additions)


def _check_config(path: Path, config: Mapping[str, Any], *, is_transposed: bool) -> None:
    needed = {**_NEEDED, "fan_in_fan_out": (True, False, None)} if is_transposed else _NEEDED
    for key, allowed in needed.items():
        if config.get(key) not in allowed:
            raise CheckpointError(
                f"{path}: key {key!r}: supported: {allowed[0]!r}, found {shown(str(config.get(key)))}"
            )
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(f"{path}: key 'alpha_pattern': expected an object, found {shown(str(patterns))}")
    for pattern in patterns:
        if len(pattern) > _MAX_NAME or _COSTLY.search(pattern):
            raise CheckpointError(
                f"{path}: key 'alpha_pattern': expected up to {_MAX_NAME} characters, {_MAX_REPEATS} repeats and no repeated group, "
                f"found {shown(pattern)}"
            )
    begin = config.get("init_lora_weights")
    if isinstance(begin, str) and begin.startswith(_OTHER_BASES):
        raise CheckpointError(
            f"{path}: key 'init_lora_weights': {shown(begin)} changes the model's weights as well; "
            "save the adapter converted to plain LoRA"
        )


def _pairs(file: SafetensorsFile) -> dict[str, dict[str, str]]:
    """Return the two tensors of each module, by "A" and "B". Modules have the names that they had in training."""
    pairs: dict[str, dict[str, str]] = {}
    for tensor in file.tensors:
        match = _TENSOR.fullmatch(tensor.removeprefix(_PREFIX))
        if match is None or len(tensor) > _MAX_NAME or text_name(match["module"]) is None:
            _fail(file, tensor, "to be lora_A.weight or lora_B.weight of a module of the language model", "another")
        pairs.setdefault(match["module"], {})[match["side"]] = tensor
    for sides in pairs.values():
        if len(sides) != 2:
            _fail(file, next(iter(sides.values())), "the other matrix of its module beside it", "none")
    return pairs


def _additions(
    file: SafetensorsFile, config: Mapping[str, Any], module: str, sides: Mapping[str, str], target: TargetModel
) -> dict[str, Addition]:
    """Return the update of each of our modules that the adapter's module covers."""
    name = text_name(module.removesuffix(_NESTED))
    assert name is not None, "see `_pairs`"
    ours = target.rename(name)
    if stacked := _STACKED.fullmatch(ours):
        return _of_experts(file, config, module, sides, target.experts, stacked)
    down, up = (file.tensors[sides[side]] for side in "AB")
    above, _, own = ours.rpartition(".")
    fused, adaptable = target.parts_of(ours), _ADAPTABLE | target.recurrent
    if not adaptable.issuperset(fused or {own}):
        known = adaptable | {part.rpartition(".")[2] for part in target.parts}
        _fail(file, down.name, f"to belong to one of {', '.join(sorted(known))}", own)
    rank = _rank(file, sides, 1)
    parts = fused or {own: slice(0, up.shape[0])}
    if num_rows(parts) != up.shape[0]:
        _fail(file, up.name, f"{num_rows(parts)} rows", str(up.shape[0]))
    scale = _scale(file, config, module, rank)
    return {
        f"{above}.{part}": Addition(factor(file, down.name), factor(file, up.name, rows), scale)
        for part, rows in parts.items()
    }


def _of_experts(
    file: SafetensorsFile,
    config: Mapping[str, Any],
    module: str,
    sides: Mapping[str, str],
    experts: TargetExperts | None,
    stacked: re.Match[str],
) -> dict[str, Addition]:
    """Return the updates of the experts' modules from an adapter of a parameter that holds the matrices of all experts."""
    if experts is None:
        _fail(file, sides["A"], "to belong to a module of the model, which has no experts", module)
    rank = _rank(file, sides, experts.num_experts)
    found = file.tensors[sides["A"]].shape[1], file.tensors[sides["B"]].shape[0]
    known = widths(experts, stacked["parameter"])
    if found not in known:
        wanted = " or ".join(f"{inputs} and {outputs}" for inputs, outputs in known)
        _fail(file, sides["A"], f"widths of the experts' matrices ({wanted})", f"{found[0]} and {found[1]}")
    possible = known[found]
    if len(possible) > 1:
        is_outputs = _is_exchanged(file, config, experts)
        possible = [each for each in possible if each[1] == is_outputs]
    if len(possible) > 1:
        names = " and ".join(name for name, _ in possible)
        _fail(file, sides["A"], f"widths that tell {names} of the experts apart", f"{found[0]} and {found[1]}")
    ((parameter, exchanged),) = possible
    own = module.removesuffix(_NESTED)
    scale = _scale(file, config, f"{own}.weight" if stacked["parameter"] else f"{own}.{parameter}", rank)
    return {
        f"{stacked['experts']}.{expert}.{projection}": Addition(down, up, scale)
        for expert, projection, down, up in each_expert(file, sides, experts, parameter, exchanged=exchanged)
    }


def _is_exchanged(file: SafetensorsFile, config: Mapping[str, Any], experts: TargetExperts) -> bool:
    """Return True if the version of PEFT gave `lora_A` the width of the outputs, where widths do not tell."""
    version = config.get("peft_version")
    found = is_exchanged(version if isinstance(version, str) else None, experts.layout)
    if found is None:
        reason = "matrices of experts are square" if experts.has_gate else "experts have no gate"
        path = file.path.with_name(CONFIG_FILE)
        raise CheckpointError(f"{path}: key 'peft_version': expected, since {reason}, found none")
    return found


def _rank(file: SafetensorsFile, sides: Mapping[str, str], num_experts: int) -> int:
    """Return the rank of two tensors that hold the matrices of so many experts."""
    down, up = (file.tensors[sides[side]] for side in "AB")
    rank, rest = divmod(down.shape[0] if len(down.shape) == 2 else 0, num_experts)
    if rest or not 1 <= rank <= MAX_RANK or 0 in down.shape:
        times = "" if num_experts == 1 else f" times {num_experts} experts"
        _fail(file, down.name, f"two dimensions, the first from 1 to {MAX_RANK}{times}", str(down.shape))
    if len(up.shape) != 2 or up.shape[1] != down.shape[0] or 0 in up.shape:
        _fail(file, up.name, f"two dimensions, the second {down.shape[0]}", str(up.shape))
    return rank


def _scale(file: SafetensorsFile, config: Mapping[str, Any], module: str, rank: int) -> float:
    return _alpha(file, config, module) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _alpha(file: SafetensorsFile, config: Mapping[str, Any], module: str) -> float:
    path, patterns = file.path.with_name(CONFIG_FILE), config.get("alpha_pattern") or {}
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
