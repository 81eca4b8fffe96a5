"""Converts a model for `jaxserve serve`: its parameters are loaded as the server would, and written as they are."""

from __future__ import annotations

import fcntl
import glob
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import jax
import msgspec

from jaxserve.checkpoint.converted import FORMAT, MANIFEST_FILE, ConversionManifest, ConvertedTensor, is_converted
from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.executor.content_digest import content_digest
from jaxserve.executor.preparation import Preparation, prepare
from jaxserve.models.registry import decoder_of, open_model
from jaxserve.models.skeleton import ModelSkeleton
from jaxserve.weights.converted import array_layout, described_tensors, save_arrays
from jaxserve.weights.loader import load_params

_LOG = logging.getLogger(__name__)
_COPIED: Final = (
    "*.json",
    "tokenizer*",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.jinja",
    "additional_chat_templates/*.jinja",
)
"""Every file but weights that a server may read, such as Kimi's `tiktoken.model`."""
_NOT_COPIED: Final = ".safetensors.index.json"


def convert(config: Config, model_path: Path, output: Path, progress: Callable[[int, int, str], None]) -> int:
    """Write the model at `model_path`, with the settings of `config`, to the new folder `output`.

    Everything is written to a folder beside it, which is renamed at the end. Returns the bytes of all files. Raises
    StartupError in one line; then `output` does not exist.
    """
    _check(config, model_path, output)
    checkpoint = open_model(model_path)
    prepared = prepare(config, decoder_of(checkpoint))
    assert isinstance(prepared.skeleton, ModelSkeleton), "a decoder"
    _remove_killed(output)
    _check_space(output, prepared.skeleton)
    params = load_params(checkpoint, prepared.skeleton, prepared.sharding, progress)
    partial = output.with_name(f"{_prefix(output)}{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        with _locked(partial):
            num_bytes = _write(partial, model_path, checkpoint, prepared, params)
            partial.rename(output)
        _sync(output.parent)
    except OSError as error:
        raise ConfigError(f"{output}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return num_bytes


def _prefix(output: Path) -> str:
    """Return the start of the names of folders for conversions to `output` that are not whole."""
    return f".{output.name}.partial-"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder, which the system releases when this process ends. Raises BlockingIOError if another has it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _remove_killed(output: Path) -> None:
    """Remove what conversions to `output` have left that were killed: their folders are not locked any more."""
    for folder in output.parent.glob(f"{glob.escape(_prefix(output))}*"):
        with suppress(OSError), _locked(folder):
            _LOG.info("%s: removed: its conversion did not end", folder)
            shutil.rmtree(folder, ignore_errors=True)


def _check(config: Config, model_path: Path, output: Path) -> None:
    config.model.check_generates()
    if os.path.lexists(output):
        raise ConfigError(f"{output}: exists already; name a folder that does not")
    if not model_path.is_dir():
        raise ConfigError(
            f"{model_path}: only a Hugging Face directory can be converted; a GGUF file is served as it is"
        )
    if is_converted(model_path):
        raise ConfigError(f"{model_path}: is converted already; convert the model that it was made from")
    if config.model.num_adapter_places:
        raise ConfigError("--lora-modules: adapters are not converted; name them when you serve")
    if config.hosts.num_hosts > 1:
        raise ConfigError(f"--num-hosts {config.hosts.num_hosts}: a conversion runs on one host")


def _check_space(output: Path, skeleton: ModelSkeleton) -> None:
    """Raise ConfigError before the model is loaded if the disk of `output` cannot hold its parameters."""
    needed = sum(spec.num_bytes for leaf in skeleton.leaves if leaf.is_converted for spec in leaf.arrays)
    folder = next(parent for parent in output.absolute().parents if parent.exists())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigError(
            f"{output}: the parameters take {needed / 2**20:.1f} MiB, and {folder} has {free / 2**20:.1f} MiB free"
        )


def _write(
    folder: Path, model_path: Path, checkpoint: Checkpoint, prepared: Preparation, params: tuple[jax.Array, ...]
) -> int:
    """Write all files, and the manifest as the last one; returns their bytes."""
    assert isinstance(prepared.skeleton, ModelSkeleton), "a decoder"
    for file in {file for pattern in _COPIED for file in model_path.glob(pattern)}:
        if file.is_file() and not file.name.endswith(_NOT_COPIED):
            copy = folder / file.relative_to(model_path)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
    save_arrays(folder, prepared.skeleton, params)
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    manifest = ConversionManifest(
        format=FORMAT,
        source_digest=content_digest(checkpoint, ""),
        layout=array_layout(prepared.skeleton),
        tensors=[
            ConvertedTensor(info.name, info.shape, info.stored_dtype, info.is_quantized)
            for info in described_tensors(checkpoint, prepared.skeleton)
        ],
        files={str(file.relative_to(folder)): file.stat().st_size for file in files},
    )
    for file in files:
        _sync(file)
    path = folder / MANIFEST_FILE
    path.write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    for each in (path, *(entry for entry in folder.rglob("*") if entry.is_dir()), folder):
        _sync(each)
    return sum(manifest.files.values())


def _sync(path: Path) -> None:
    """Have the system write a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
