"""The API keys of a config."""

from __future__ import annotations

from pathlib import Path

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError


def api_keys(server: ServerConfig) -> list[str]:
    """Return the keys of `--api-key` and `--api-key-file`; an empty list if neither is set: the API is open.

    Raises ConfigError if one is set but holds no key, so that a mistake never opens the server.
    """
    keys = []
    if server.api_key is not None:
        keys += _required("--api-key", server.api_key.split(","))
    if server.api_key_file is not None:
        source = f"--api-key-file {server.api_key_file}"
        try:
            lines = Path(server.api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source}: {getattr(error, 'strerror', None) or 'not UTF-8'}") from None
        keys += _required(source, [line for line in lines if not line.lstrip().startswith("#")])
    return keys


def _required(source: str, texts: list[str]) -> list[str]:
    keys = [text.strip() for text in texts if text.strip()]
    if not keys:
        raise ConfigError(f"{source}: holds no key")
    return keys
