"""Defaults of sampling options that the publisher of a model recommends."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from jaxserve.checkpoint.json_file import read_object
from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.errors import CheckpointError
from jaxserve.sampling.params import DEFAULTS, OPTIONS, RECOMMENDED, option_type

_FILE: Final = "generation_config.json"


def sampling_defaults(setting: str, checkpoint: Checkpoint) -> dict[str, int | float]:
    """Return the recommended defaults by option; `setting` is `--generation-config`.

    Lengths, beams and `do_sample` are not taken: they are for programs that generate one text. Raises CheckpointError
    for a file that cannot be read, and for a value that no request could have.
    """
    if setting == "none":
        return {}
    if setting == "auto":
        origin = checkpoint.path / _FILE if checkpoint.path.is_dir() else checkpoint.path
        return _checked(checkpoint.generation_config, origin, "--generation-config none goes without")
    path = Path(setting).expanduser()
    file = path / _FILE if path.is_dir() else path
    return _checked(read_object(file), file, "as --generation-config has it")


def _checked(config: dict[str, Any], origin: Path, advice: str) -> dict[str, int | float]:
    defaults: dict[str, int | float] = {}
    for name in RECOMMENDED:
        value = config.get(name)
        if value is None:
            continue
        try:
            defaults[name] = (
                DEFAULTS[name] if value == OPTIONS[name].alias else msgspec.convert(value, option_type(name, str))
            )
        except msgspec.ValidationError as error:
            raise CheckpointError(f"{origin}: key '{name}': {error}, found {str(value)[:80]} ({advice})") from None
    return defaults
