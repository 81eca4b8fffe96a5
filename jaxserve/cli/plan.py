"""`jaxserve plan`: what a model will need on a device, before anything is loaded. Touches no accelerator."""

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
exit codes: 0 it fits, 1 it does not (the last table says what would), 2 a mistake in the command or the model

MODEL may also be a directory that holds config.json and no weights; of a hub id, only config files are fetched.
"""
_LEAST_WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The settings that decide sizes, and what to plan for."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    group = parser.add_argument_group("plan")
    group.add_argument("--device", choices=NAMES, default="cpu", help="device to plan for (default: cpu, this one)")
    group.add_argument(
        "--device-memory", metavar="SIZE", help="memory of one device that may be used (default: what is known of it)"
    )
    group.add_argument("--json", action="store_true", help="print the plan as JSON")
    group.add_argument("--no-compile", action="store_true", help="estimate the workspace instead of compiling")
    group.add_argument(
        "--all-programs", action="store_true", help="compile every program, not only the largest of each kind"
    )
    add_flags(parser, sections=ENGINE_SECTIONS)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; the exit code says whether it fits."""
    config = config_from_flags(arguments)
    config.model.check_generates()
    if config.model.adapters:
        raise ConfigError("--lora-modules: plans are made of the model alone; leave adapters out")
    device = find_device(arguments.device, _device_memory(arguments.device_memory))
    with _only_errors():  # what the engine would warn of stands in the notes
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
    # Here: jax takes seconds that a mistake in a flag need not wait for.
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
