"""`jaxserve plan`: memory and speed of a model on a device, without loading it or using an accelerator."""

from __future__ import annotations

import argparse
import sys

from jaxserve.cli.flags import add_flags, config_from_flags
from jaxserve.errors import ConfigError
from jaxserve.runtime.settings import BY_NAME, ENGINE_SECTIONS, parse_value
from jaxserve.tools.planning.devices import NAMES

EXIT_FITS, EXIT_DOES_NOT_FIT = 0, 1
EPILOG = """\
exit codes: 0 fits, 1 does not fit (the last table lists changes that do), 2 error in the command or the model

MODEL may be a directory with only config.json; of a hub id, only config files are fetched.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the device and the settings that determine sizes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    group = parser.add_argument_group("plan")
    group.add_argument(
        "--device",
        metavar="NAME[xN|-N]",
        default="cpu",
        help=f"device to plan for: {', '.join(NAMES)} (default: cpu, this machine's); h200x8: eight on each host; v5e-16: a "
        "TPU slice of 16",
    )
    group.add_argument("--hosts", metavar="N", type=int, default=1, help="hosts with that many devices (default: 1)")
    group.add_argument("--device-memory", metavar="SIZE", help="usable memory of one device (default: the device's)")
    group.add_argument("--json", action="store_true", help="print the plan as JSON")
    group.add_argument("--no-compile", action="store_true", help="estimate the workspace instead of compiling")
    group.add_argument(
        "--all-programs", action="store_true", help="compile every program, not only the largest of each kind"
    )
    add_flags(parser, sections=ENGINE_SECTIONS)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; returns 0 if the model fits, else 1."""
    config = config_from_flags(arguments)
    config.model.check_generates()
    if config.model.adapters:
        raise ConfigError("--lora-modules: `plan` does not support adapters")
    memory = arguments.device_memory and parse_value(
        BY_NAME["kv_cache_memory"], arguments.device_memory, "--device-memory"
    )
    if arguments.hosts < 1:
        raise ConfigError(f"--hosts {arguments.hosts}: at least 1")

    from jaxserve.tools.planning.machine import find_machine
    from jaxserve.tools.planning.plan import to_json  # imports jax, which takes seconds, after the flags are checked
    from jaxserve.tools.planning.planner import make_plan
    from jaxserve.tools.planning.report import print_plan

    machine = find_machine(arguments.device, arguments.hosts, memory if isinstance(memory, int) else None)
    plan = make_plan(config, machine, compiles=not arguments.no_compile, all_programs=arguments.all_programs)
    if arguments.json:
        sys.stdout.buffer.write(to_json(plan))
        sys.stdout.flush()
    else:
        print_plan(plan)
    return EXIT_FITS if plan.fits else EXIT_DOES_NOT_FIT
