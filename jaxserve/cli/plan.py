"""`jaxserve plan`: memory and speed of a model on a device, without loading it or using an accelerator."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxserve.cli.flags import add_flags, config_from_flags
from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.runtime.environment import child_environment
from jaxserve.runtime.settings import BY_NAME, ENGINE_SECTIONS, parse_value
from jaxserve.runtime.startup_display import StartupDisplay
from jaxserve.tools.planning.devices import NAMES, Device, find_device

if TYPE_CHECKING:
    from jaxserve.tools.planning.plan import Plan

EXIT_FITS, EXIT_DOES_NOT_FIT = 0, 1
EPILOG = """\
exit codes: 0 fits, 1 does not fit (the last table lists changes that do), 2 error in the command or the model

MODEL may be a directory with only config.json; of a hub id, only config files are fetched.
"""
_LEAST_WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the device and the settings that determine sizes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    group = parser.add_argument_group("plan")
    group.add_argument(
        "--device", choices=NAMES, default="cpu", help="device to plan for (default: cpu, this machine's)"
    )
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
    device = find_device(arguments.device, _device_memory(arguments.device_memory))
    with _only_errors():  # the notes have the engine's warnings
        plan = _make_plan(config, device, arguments)
    if arguments.json:
        from jaxserve.tools.planning.plan import to_json

        sys.stdout.buffer.write(to_json(plan))
        sys.stdout.flush()
    else:
        _print(plan)
    return EXIT_FITS if plan.fits else EXIT_DOES_NOT_FIT


@contextlib.contextmanager
def _only_errors() -> Iterator[None]:
    logger = logging.getLogger("jaxserve")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _make_plan(config: Config, device: Device, arguments: argparse.Namespace) -> Plan:
    # Imports jax, which takes seconds, after the flags are checked.
    from jaxserve.checkpoint.source import resolve
    from jaxserve.tools.planning.compiler import compile_programs
    from jaxserve.tools.planning.cpu_rates import measure_cpu_rates
    from jaxserve.tools.planning.model import read_model
    from jaxserve.tools.planning.planner import Planner
    from jaxserve.tools.planning.targets import missing_compiler

    model = read_model(resolve(config.model.model, config.model.revision, weights=False))
    rates = measure_cpu_rates() if device.platform == "cpu" else device.rates
    planner = Planner(model, device, rates, all_programs=arguments.all_programs)
    if arguments.no_compile:
        return planner.plan(config, None)
    missing = missing_compiler(device, config.parallel.tensor_parallel_size)
    if missing is not None:
        return planner.plan(config, None, [f"nothing was compiled, the workspace is estimated: {missing}"])
    with StartupDisplay() as display:
        return planner.plan(config, lambda job: compile_programs(job, child_environment(), display.show_compiled))


def _device_memory(raw: str | None) -> int | None:
    if raw is None:
        return None
    value = parse_value(BY_NAME["kv_cache_memory"], raw, "--device-memory")
    return value if isinstance(value, int) else None


def _print(plan: Plan) -> None:
    from rich.console import Console

    from jaxserve.tools.planning.report import print_plan

    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = max(console.width, _LEAST_WIDTH)
    print_plan(plan, console)
