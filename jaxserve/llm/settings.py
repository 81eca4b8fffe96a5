"""The settings of an LLM: those of the server that are not about HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.runtime.config_loader import load_config
from jaxserve.runtime.environment import caches_environment
from jaxserve.runtime.settings import ENGINE_SECTIONS, SETTINGS, closest

_OF_THE_SERVER: Final = {"tool_call_parser", "reasoning_parser", "log_level", "log_format", "stall_timeout", "uds_dir"}
_NOT_OURS: Final = {"served_model_name", "max_queued_requests", "max_queued_tokens"}
_UNLIMITED: Final = 2**31 - 1
"""Whoever calls us waits for all prompts: none is sent away."""
ACCEPTED: Final = frozenset(
    setting.name for setting in SETTINGS if setting.section in ENGINE_SECTIONS or setting.name in _OF_THE_SERVER
) - (_NOT_OURS)


def llm_config(model: str | None, settings: Mapping[str, object]) -> Config:
    """The config of these settings, which are spelled as in a config file. Of the environment only $XDG_CACHE_HOME counts.

    Raises ConfigError naming a setting that is unknown or about HTTP, or a value and its limits.
    """
    for name in settings:
        if name not in ACCEPTED:
            raise ConfigError(f"LLM(..., {name}=...): not a setting of an engine{closest(name, ACCEPTED)}")
    ours = {"log_level": "warning", **settings, "max_queued_requests": _UNLIMITED, "max_queued_tokens": _UNLIMITED}
    return load_config(flags=ours if model is None else {"model": model, **ours}, environ=caches_environment())
