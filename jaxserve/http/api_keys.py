"""The API keys of a server: from `--api-key` and `--api-key-file`, as records with the tenants that they make."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from jaxserve.config import Config, ServerConfig
from jaxserve.errors import ConfigError
from jaxserve.metrics import Metrics
from jaxserve.tenants import KeyRecord, Tenant
from jaxserve.yaml_values import integer, switch, yaml_loader


def api_keys(server: ServerConfig) -> list[str]:
    """Return the keys of `key_records`."""
    return [record.key for record in key_records(server)]


def key_records(server: ServerConfig) -> list[KeyRecord]:
    """Return the keys of `--api-key` and `--api-key-file`; an empty list if neither is set: the API is open.

    Raises ConfigError if one is set but holds no key, so that a mistake never opens the server.
    """
    records = []
    if server.api_key is not None:
        records += [KeyRecord(key=key) for key in _required("--api-key", server.api_key.split(","))]
    if server.api_key_file is not None:
        source = f"--api-key-file {server.api_key_file}"
        try:
            text = Path(server.api_key_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source}: {getattr(error, 'strerror', None) or 'not UTF-8'}") from None
        if Path(server.api_key_file).suffix in (".yaml", ".yml", ".json"):
            records += _read_records(source, text)
        else:
            lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
            records += [KeyRecord(key=key) for key in _required(source, lines)]
    return records


def _read_records(source: str, text: str) -> list[KeyRecord]:
    """Return the records of a list in YAML, of which JSON is a part. No message repeats a key. Raises ConfigError."""
    import yaml  # only a server with such a file pays for it

    try:
        content = yaml.load(text, yaml_loader())
        listed = [_parsed(one) for one in content] if isinstance(content, list) else content
        records = msgspec.convert(listed, list[KeyRecord])
    except yaml.YAMLError:
        raise ConfigError(f"{source}: not YAML") from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}") from None
    names = [record.name for record in records]
    if not records or not all(record.key.strip() and record.name.strip() for record in records):
        raise ConfigError(f"{source}: expected a list of records, each with `key` and `name`")
    if len(set(names)) < len(names):
        raise ConfigError(f"{source}: two keys have the same name")
    for record in records:
        for name in ("max_concurrent_requests", "requests_per_minute", "tokens_per_minute"):
            limit = getattr(record, name)
            if limit is not None and limit < 1:
                raise ConfigError(f"{source}: {name} of {record.name!r} must be at least 1, got {limit}")
    return records


def _parsed(record: object) -> object:
    """Return a record with the values of its fields parsed; those that cannot be stay for the error of the conversion."""
    if not isinstance(record, dict):
        return record
    found = dict(record)
    for field in msgspec.structs.fields(KeyRecord):
        if field.type is not str and found.get(field.name) is not None:
            with contextlib.suppress(ValueError):
                found[field.name] = (switch if field.type is bool else integer)(found[field.name])
    return found


def make_tenants(records: Sequence[KeyRecord], config: Config, metrics: Metrics) -> list[Tenant]:
    """Return the tenants of keys, in one of the config's API processes."""
    return [Tenant(record, metrics, config.server.api_processes) for record in records]


def _required(source: str, texts: list[str]) -> list[str]:
    keys = [text.strip() for text in texts if text.strip()]
    if not keys:
        raise ConfigError(f"{source}: holds no key")
    return keys
