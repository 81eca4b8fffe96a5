"""`jaxserve convert`: write a model's parameters as the server holds them, for a faster start."""

from __future__ import annotations

import argparse
import shlex

from jaxserve.checkpoint.source import resolve_model
from jaxserve.cli.flags import add_flags, config_from_flags, output_folder
from jaxserve.log import configure_logging
from jaxserve.runtime.settings import ENGINE_SECTIONS
from jaxserve.runtime.startup_display import StartupDisplay

EPILOG = """\
MODEL is a Hugging Face directory, a MaxText checkpoint or a hub id. OUT gets its config and tokenizer, and an Orbax checkpoint of its
parameters, quantised and laid out for the settings: --quantization, --dtype, --tensor-parallel-size and the kind of
device. `jaxserve serve OUT` wants the same settings. OUT appears when it is complete.
"""
_MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add OUT and the settings that determine the parameters."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add_flags(parser, sections=ENGINE_SECTIONS)
    parser.add_argument("output", nargs="?", metavar="OUT", help="folder to write; it must not exist")


def run(arguments: argparse.Namespace) -> int:
    """Convert, and print the command that serves the result."""
    output = output_folder("OUT", arguments.output)
    config = config_from_flags(arguments)
    configure_logging(config.server.log_level, config.server.log_format)
    path = resolve_model(config.model)

    from jaxserve.executor.convert import convert  # imports jax, after the flags are checked

    with StartupDisplay() as display:
        num_bytes = convert(config, path, output, display.show_loaded)
    print(f"{output}: {num_bytes / _MIB:.1f} MiB")
    print(f"serve with: {shlex.join(['jaxserve', 'serve', str(output)])} and the same settings")
    return 0
