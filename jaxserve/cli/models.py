"""`jaxserve models`: the models that are on this machine, and which of them it can serve."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from jaxserve.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the folders and the device."""
    parser.add_argument(
        "folders", nargs="*", metavar="FOLDER", help="folders of models, beside the default one and the hub's cache"
    )
    parser.add_argument(
        "--device", default="cpu", metavar="NAME", help="device to serve on, as for `jaxserve plan` (default: this CPU)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print one line per model, and why those that cannot be served cannot; returns 0."""
    folders = [Path(folder) for folder in arguments.folders]
    for folder in folders:
        if not os.path.isdir(folder):
            raise ConfigError(f"{folder}: no such folder")

    from jaxserve.tools.models import describe_model, local_models  # imports jax, after the arguments are checked
    from jaxserve.tools.planning.machine import find_machine

    machine = find_machine(arguments.device)
    models = list(local_models(folders))
    if not models:
        print("no models: `jaxserve serve owner/name` fetches one of the Hugging Face hub; or name a FOLDER")
        return 0
    width = max(len(model.name) for model in models)
    print(f"{'MODEL':<{width}}  {'PARAMETERS':>10}  {'ON DISK':>8}  {'WEIGHTS':>8}  {machine.device.name.upper()}")
    for model in models:
        row = describe_model(model, machine)
        numbers = f"{_short(row.num_parameters):>10}  {_gib(row.stored_bytes):>8}  {_gib(row.weights_bytes):>8}"
        verdict = "fits, embeds texts" if row.task == "embed" else "fits"
        print(f"{row.name:<{width}}  {numbers}  {row.problem or verdict}")
    return 0


def _short(count: int | None) -> str:
    if count is None:
        return "-"
    return f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.0f} M"


def _gib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / (1 << 30):.2f}G"
