"""The environment of this process. No other module reads environment variables for the program."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.runtime.config_loader import CACHES_VARIABLE, CONFIG_FILE_VARIABLE, environment_values, load_config
from jaxserve.runtime.settings import BY_NAME


def load_config_here(flags: Mapping[str, object], file: str | None) -> Config:
    """Return the config of flags, this process's environment and a YAML file. Raises ConfigError.

    file: the value of `--config`; without one JAXSERVE_CONFIG names the file.
    """
    path = file or os.environ.get(CONFIG_FILE_VARIABLE)
    return load_config(flags=flags, environ=os.environ, file=Path(path) if path else None)


def base_url(given: str | None) -> str:
    """Return the base URL of the server that `--url` names, else of this environment's server, without OpenAI's `/v1`.

    Raises ConfigError for a text that is no URL.
    """
    if given is None:
        return server_url(os.environ)
    url = given if "://" in given else f"http://{given}"
    if not re.match(r"https?://[^/]", url):
        raise ConfigError(f"--url {given!r}: expected a URL like http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")


def server_url(environ: Mapping[str, str]) -> str:
    """Return the local URL of a server started with this environment."""
    values = environment_values(environ)
    host = values.get("host") or BY_NAME["host"].default
    port = values.get("port") or BY_NAME["port"].default
    local = "127.0.0.1" if host in ("0.0.0.0", "::") else str(host)
    return f"http://[{local}]:{port}" if ":" in local else f"http://{local}:{port}"


def environment_api_key() -> str | None:
    """Return the first key of JAXSERVE_API_KEY, which clients of that server send."""
    keys = os.environ.get(BY_NAME["api_key"].variable, "")
    return keys.split(",")[0].strip() or None


def caches_environment() -> dict[str, str]:
    """Return the only variable that `LLM` reads: XDG_CACHE_HOME, if it is set."""
    return {CACHES_VARIABLE: os.environ[CACHES_VARIABLE]} if CACHES_VARIABLE in os.environ else {}


def child_environment() -> dict[str, str]:
    """Return a copy of this process's environment, for a child process."""
    return dict(os.environ)


def restart_with(variables: Mapping[str, str]) -> None:
    """Execute this command again with `variables` if any is unset: glibc reads some before Python starts."""
    missing = {name: value for name, value in variables.items() if name not in os.environ}
    if missing:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **missing})
