"""The forms of published drafters that are no models by themselves: how a folder is known to have one, and how it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jaxserve.checkpoint.drafters.dflash import dflash_config, is_dflash, with_dflash_names
from jaxserve.checkpoint.drafters.eagle import eagle_config, is_eagle_head, with_head_names
from jaxserve.checkpoint.drafters.gemma4 import assistant_config, is_assistant
from jaxserve.checkpoint.files import read_config
from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.model_config.assistant import AssistantConfig
from jaxserve.model_config.predictor import DFlashConfig, EagleConfig

DrafterInputs = EagleConfig | AssistantConfig | DFlashConfig


@dataclass(frozen=True, slots=True)
class DrafterForm:
    """A kind of drafter that is read as a decoder with its layers."""

    kind: str
    is_one: Callable[[Mapping[str, Any]], bool]
    """Return True for `config.json` of such a drafter."""
    read: Callable[[Mapping[str, Any]], tuple[dict[str, Any], DrafterInputs]]
    """Return `config.json` of the decoder, and what the drafter reads of its model. Raises CheckpointError in one line."""
    with_names: Callable[[Checkpoint, Any], Checkpoint] = lambda checkpoint, inputs: checkpoint
    """Return the tensors under the names of the decoder, whose config the checkpoint has."""


_FORMS: Final = (
    DrafterForm("DFlash drafter", is_dflash, dflash_config, with_dflash_names),
    DrafterForm("EAGLE-3 head", is_eagle_head, eagle_config, with_head_names),
    DrafterForm("drafter of Gemma 4", is_assistant, assistant_config),
)


def drafter_form(path: Path) -> DrafterForm | None:
    """Return the form of the drafter in the folder at `path`; None if there is a model, or a file."""
    if not (path / "config.json").is_file():
        return None
    config = read_config(path)
    return next((form for form in _FORMS if form.is_one(config)), None)
