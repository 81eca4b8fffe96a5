"""The settings of an LLM: all settings of the server except those about HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.runtime.environment import caches_environment, load_config
from jaxserve.runtime.settings import ENGINE_SECTIONS, SETTINGS, closest

_SERVER_SETTINGS: Final = {
    "tool_call_parser",
    "reasoning_parser",
    "log_level",
    "log_format",
    "stall_timeout",
    "uds_dir",
}
_EXCLUDED: Final = {"served_model_name", "max_queued_requests", "max_queued_tokens"}
_UNLIMITED: Final = 2**31 - 1
"""The caller waits for all prompts: none is rejected because the queue is full."""
ACCEPTED: Final = frozenset(
    setting.name for setting in SETTINGS if setting.section in ENGINE_SECTIONS or setting.name in _SERVER_SETTINGS
) - (_EXCLUDED)


def llm_config(model: str | None, settings: Mapping[str, object]) -> Config:
    """Return the config of settings named as in a config file. Only $XDG_CACHE_HOME is read from the environment.

    Raises ConfigError for a setting that is unknown or about HTTP, and for an invalid value.
    """
    for name in settings:
        if name not in ACCEPTED:
            raise ConfigError(f"LLM(..., {name}=...): not a setting of an engine{closest(name, ACCEPTED)}")
    given = {"log_level": "warning", **settings, "max_queued_requests": _UNLIMITED, "max_queued_tokens": _UNLIMITED}
    return load_config(flags=given if model is None else {"model": model, **given}, environ=caches_environment())
