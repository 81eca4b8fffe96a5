"""Finds the family of a checkpoint: every module of `families/` is one, found by scanning the folder."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxserve.checkpoint.json_file import read_object
from jaxserve.checkpoint.open import open_checkpoint
from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.errors import CheckpointError
from jaxserve.models import families
from jaxserve.models.config import DecoderConfig
from jaxserve.models.families._keys import Keys

ReadConfig = Callable[[dict[str, Any]], DecoderConfig]


@cache
def architectures() -> Mapping[str, ReadConfig]:
    """By the name `config.json` gives in `architectures`: the function that reads such a config."""
    found: dict[str, ReadConfig] = {}
    for module_info in pkgutil.iter_modules(families.__path__):
        if module_info.name.startswith("_"):
            continue
        family = import_module(f"{families.__name__}.{module_info.name}")
        for name in family.ARCHITECTURES:
            if name in found:
                raise RuntimeError(f"two families claim {name}; the second is {module_info.name}")
            found[name] = family.decoder_config
    return MappingProxyType(found)


def decoder_config(hf: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> DecoderConfig:
    """What `config.json` (and `generation_config.json`, for the end tokens) describes.

    Raises CheckpointError naming the key for an architecture or a value that is not supported.
    """
    read = _reader(hf)
    config = read(dict(hf))
    bos = hf.get("bos_token_id")
    return replace(
        config,
        eos_token_ids=_eos_token_ids(config.vocab_size, generation or {}, hf),
        bos_token_id=None if bos is None else Keys(hf).integer("bos_token_id", config.vocab_size - 1, low=0),
    )


def decoder_of(checkpoint: Checkpoint) -> DecoderConfig:
    """What `checkpoint` describes; a refusal names it."""
    return _named(checkpoint.path, checkpoint.config, checkpoint.generation_config)


def read_decoder(path: Path) -> tuple[DecoderConfig, Checkpoint | None]:
    """The model at `path`, of which only headers are read, and its checkpoint.

    A directory needs no more than config.json; then there is no checkpoint. Raises CheckpointError in one line.
    """
    config, generation = path / "config.json", path / "generation_config.json"
    if not config.is_file() or any(path.glob("*.safetensors")):
        checkpoint = open_checkpoint(path)
        return decoder_of(checkpoint), checkpoint
    return _named(path, read_object(config), read_object(generation) if generation.is_file() else {}), None


def _named(path: Path, hf: Mapping[str, Any], generation: Mapping[str, Any]) -> DecoderConfig:
    try:
        return decoder_config(hf, generation)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _reader(hf: Mapping[str, Any]) -> ReadConfig:
    names = hf.get("architectures")
    known = architectures()
    supported = ", ".join(sorted(known))
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise Keys(hf).refusal("architectures", f"a list whose first entry is one of {supported}")
    if names[0] not in known:
        raise CheckpointError(
            f"model config: the architecture {names[0][:80]!r} is not supported; supported: {supported}"
        )
    return known[names[0]]


def _eos_token_ids(vocab_size: int, *sources: Mapping[str, Any]) -> tuple[int, ...]:
    """Union in order of the sources: chat checkpoints often name the end of a turn in only one of the two files."""
    found: dict[int, None] = {}
    for source in sources:
        value = source.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [] if value is None else [value]:
            found[Keys({"eos_token_id": token_id}).integer("eos_token_id", vocab_size - 1, low=0)] = None
    return tuple(found)
