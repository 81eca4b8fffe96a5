"""Folders that sentence-transformers saves a model and its modules in, as `modules.json` lists them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from jaxserve.checkpoint.files import read_objects
from jaxserve.errors import CheckpointError, shown

MODULES: Final = "modules.json"


def transformer_folder(directory: Path) -> Path:
    """Return the folder with the weights of a model: `directory`, or the one inside it that sentence-transformers saved before it put the
    model beside `modules.json`. Raises CheckpointError for a folder elsewhere."""
    modules = directory / MODULES
    if (directory / "config.json").is_file() or not modules.is_file():
        return directory
    for module in read_objects(modules):
        if module_kind(module) == "Transformer" and module.get("path"):
            return directory / module_folder(modules, module)
    return directory


def modules_directory(model: Path) -> Path | None:
    """Return the folder whose `modules.json` the model in folder `model` belongs to: that one, or the one around it; None without one."""
    if (model / MODULES).is_file():
        return model
    around = model.absolute().parent
    if (around / MODULES).is_file() and transformer_folder(around).name == model.name != "":
        return around
    return None


def module_kind(module: Mapping[str, Any]) -> str:
    """Return the name of a module's class."""
    return str(module.get("type")).rpartition(".")[2]


def module_folder(modules: Path, module: Mapping[str, Any]) -> str:
    """Return the name of a module's folder. Raises CheckpointError for a folder that is not beside `modules`."""
    folder = module.get("path")
    if not isinstance(folder, str) or "/" in folder or "\\" in folder or folder.startswith("."):
        raise CheckpointError(f"{modules}: path: expected the name of a folder beside it, found {shown(str(folder))}")
    return folder
