"""`jaxserve plan`: memory and speed of a model on a device, without loading it or using an accelerator."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxserve.cli.flags import add_flags, add_model_flag, configs_from_flags
from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.runtime.settings import BY_NAME, SIZE_SECTIONS, parse_value
from jaxserve.tools.planning.devices import NAMES

if TYPE_CHECKING:
    from jaxserve.tools.planning.machine import Machine

EXIT_FITS, EXIT_DOES_NOT_FIT = 0, 1
EPILOG = """\
exit codes: 0 fits, 1 does not fit (the last table lists changes that do), 2 error in the command or the model

MODEL may be a directory with only config.json; of a hub id, only config files are fetched. Of several models (--model, or
`models:` in the file of --config) it prints whether they fit together, and each model's tables.
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
    add_model_flag(parser)
    add_flags(parser, sections=SIZE_SECTIONS)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; returns 0 if the model fits, or all models together, else 1."""
    configs = configs_from_flags(arguments)
    memory = arguments.device_memory and parse_value(
        BY_NAME["kv_cache_memory"], arguments.device_memory, "--device-memory"
    )
    most = BY_NAME["num_hosts"].most
    if not 1 <= arguments.hosts <= (most or 1):
        raise ConfigError(f"--hosts {arguments.hosts}: at least 1 and at most {most}")

    # It imports jax, which takes seconds, after the flags are checked.
    from jaxserve.tools.planning.machine import find_machine

    machine = find_machine(arguments.device, arguments.hosts, memory if isinstance(memory, int) else None)
    options = {"compiles": not arguments.no_compile, "all_programs": arguments.all_programs}
    show = _show_model if len(configs) == 1 else _show_models
    return EXIT_FITS if show(configs, machine, options, as_json=arguments.json) else EXIT_DOES_NOT_FIT


def _show_model(configs: Sequence[Config], machine: Machine, options: Mapping[str, bool], *, as_json: bool) -> bool:
    """Print the plan of the only model; returns True if it fits."""
    from jaxserve.tools.planning.planner import make_plan
    from jaxserve.tools.planning.report import print_plan

    plan = make_plan(configs[0], machine, **options)
    _print_json(plan) if as_json else print_plan(plan)
    return plan.fits


def _show_models(configs: Sequence[Config], machine: Machine, options: Mapping[str, bool], *, as_json: bool) -> bool:
    """Print the plan of several models; returns True if they fit together."""
    from jaxserve.tools.planning.report import print_server_plan
    from jaxserve.tools.planning.server_plan import make_server_plan

    plan = make_server_plan(configs, machine, **options)
    _print_json(plan) if as_json else print_server_plan(plan)
    return plan.fits


def _print_json(plan: object) -> None:
    from jaxserve.tools.planning.plan import to_json

    sys.stdout.buffer.write(to_json(plan))
    sys.stdout.flush()
