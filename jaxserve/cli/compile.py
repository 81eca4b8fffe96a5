"""`jaxserve compile`: compile every program of a model into a directory for `jaxserve serve --compile-cache`."""

from __future__ import annotations

import argparse
import shlex

from jaxserve.checkpoint.source import resolve_model
from jaxserve.cli.flags import add_flags, config_from_flags, output_folder
from jaxserve.config import Config
from jaxserve.log import configure_logging
from jaxserve.runtime.settings import BY_NAME, SETTINGS, SIZE_SECTIONS, format_value, value_of
from jaxserve.runtime.startup_display import StartupDisplay

EPILOG = """\
Run it on the same kind of host and device as the server, with the server's settings. No weights are loaded: MODEL may
be a directory with only config.json, and of a hub id only config files are fetched. --output replaces --compile-cache.
"""
_MIB = 1 << 20
_OTHERS = ("model", "compile_cache", "hf_overrides_dir")
"""Settings that do not decide programs, or that the command gives otherwise."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --output and the settings that determine the programs."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("--output", metavar="DIR", help="directory to fill; programs that it has already are kept")
    add_flags(parser, sections=SIZE_SECTIONS)


def run(arguments: argparse.Namespace) -> int:
    """Compile, list the programs, and print the command that serves with them."""
    directory = output_folder("--output", arguments.output)
    config = config_from_flags(arguments)
    configure_logging(config.server.log_level, config.server.log_format)
    path = resolve_model(config.model, weights=False)

    from jaxserve.executor.precompile import precompile  # imports jax, after the flags are checked

    with StartupDisplay() as display:
        result = precompile(config, path, directory, _settings(config), display.show_compiled)
    width = max(len(entry.name) for entry in result.manifest.programs)
    print(f"{'program':<{width}} {'MiB':>7} {'seconds':>8}")
    for entry in result.manifest.programs:
        seconds = "cached" if entry.compile_seconds is None else f"{entry.compile_seconds:.1f}"
        print(f"{entry.name:<{width}} {entry.num_bytes / _MIB:7.1f} {seconds:>8}")
    flags = ["--kv-cache-memory", str(result.kv_cache_bytes)] if config.cache.kv_cache_memory is None else []
    command = ["jaxserve", "serve", config.model.model, *_flags(config), *flags, "--compile-cache", str(directory)]
    print(f"serve with: {shlex.join(command)}")
    return 0


def _settings(config: Config) -> dict[str, str]:
    """Return the settings that differ from their defaults, by name, without secrets."""
    return {
        setting.name: str(format_value(setting, value))
        for setting in SETTINGS
        if setting.section in SIZE_SECTIONS and setting.name not in _OTHERS and not setting.is_secret
        if (value := value_of(config, setting)) != setting.default
    }


def _flags(config: Config) -> list[str]:
    """Return the settings that differ from their defaults, as words of a command line."""
    words: list[str] = []
    for name, value in _settings(config).items():
        flag = BY_NAME[name].flag
        if BY_NAME[name].kind == "switch":
            words.append(flag if value == "true" else f"--no-{flag.removeprefix('--')}")
        else:
            words += [flag, value]
    return words
