"""The models that are on this machine: the default one, those in the hub's cache, and those in given folders."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub import constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from jaxserve.checkpoint.gguf.split import part_names
from jaxserve.config import Config, ModelConfig
from jaxserve.errors import ConfigError, StartupError
from jaxserve.runtime.environment import DEFAULT_MODEL, default_model
from jaxserve.tools.planning.machine import Machine
from jaxserve.tools.planning.planner import plan_model, quiet_engine


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model whose weights are on this machine."""

    name: str
    """Name that `jaxserve serve` takes."""
    path: Path
    problem: str | None = None
    """The reason why it cannot be read; None if it was not tried."""


@dataclass(frozen=True, slots=True)
class ModelRow:
    """Sizes of a model that was not loaded."""

    name: str
    num_parameters: int | None = None
    stored_bytes: int | None = None
    stored_dtypes: tuple[str, ...] = ()
    weights_bytes: int | None = None
    """Memory of the weights on one device."""
    problem: str | None = None
    """The reason why it cannot be served on this device with default settings; None if it can."""
    task: Literal["generate", "embed"] = "generate"


def local_models(folders: Sequence[Path]) -> Iterator[LocalModel]:
    """Yield the models, those of `folders` after the others. Raises ConfigError for a cache or a folder that cannot be read."""
    with contextlib.suppress(StartupError):
        yield LocalModel(DEFAULT_MODEL, default_model())
    try:
        repositories = sorted(scan_cache_dir(constants.HF_HUB_CACHE).repos, key=lambda repository: repository.repo_id)
    except (CacheNotFound, RuntimeError):  # the user has no home directory
        repositories = []
    except (OSError, ValueError) as error:  # ValueError: it is a file
        raise ConfigError(
            f"the hub's cache {constants.HF_HUB_CACHE} cannot be read: {error}; HF_HOME names another"
        ) from error
    for repository in repositories:
        if repository.repo_type == "model" and repository.revisions:
            newest = max(repository.revisions, key=lambda revision: revision.last_modified)
            yield from models_in(newest.snapshot_path, repository.repo_id, separator=":", gguf="**/*.gguf")
    for folder in folders:
        for inner in _with_subfolders(folder):
            try:
                yield from list(models_in(inner, str(inner), separator="/"))
            except OSError as error:  # it is another user's
                yield LocalModel(str(inner), inner, f"cannot be read: {error.strerror}")


def _with_subfolders(folder: Path) -> list[Path]:
    """Return a folder and those in it. Raises ConfigError."""
    try:
        return [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read: {error.strerror}") from error


def models_in(folder: Path, name: str, *, separator: str, gguf: str = "*.gguf") -> Iterator[LocalModel]:
    """Yield the safetensors model of a folder, and its GGUF models, split ones by their first file. gguf: pattern of their files."""
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        yield LocalModel(name, folder)
    for file in sorted(folder.glob(gguf)):
        if file.name == part_names(file.name)[0]:
            yield LocalModel(f"{name}{separator}{file.relative_to(folder)}", file)


def describe_model(model: LocalModel, machine: Machine) -> ModelRow:
    """Read the config of a model, and plan it for a machine with default settings; nothing is compiled."""
    if model.problem is not None:
        return ModelRow(model.name, problem=model.problem)
    config = Config(model=ModelConfig(model=str(model.path)))
    try:
        with quiet_engine():
            plan = plan_model(config, machine, None, compiles=False)
    except StartupError as error:
        return ModelRow(model.name, problem=str(error))
    return ModelRow(
        model.name,
        plan.model.num_parameters,
        plan.model.stored_bytes,
        plan.model.stored_dtypes,
        plan.weights_bytes,
        None if plan.fits else plan.reason,
        plan.task,
    )
