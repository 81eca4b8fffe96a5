"""Fills a compile cache without loading a model: programs follow from shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from jaxserve.checkpoint.source import resolve_tower
from jaxserve.config import Config
from jaxserve.errors import ConfigError, StartupError
from jaxserve.executor.adapters import adapters_config, open_adapters
from jaxserve.executor.draft_model import read_draft_config
from jaxserve.executor.preparation import prepare
from jaxserve.executor.self_test.check import with_tested_kernels
from jaxserve.ipc.report import PhaseClock
from jaxserve.models.registry import read_decoder, text_model
from jaxserve.runner.images.served import with_served_images
from jaxserve.runner.inputs import Program
from jaxserve.runner.program_cache import FORMAT, SUFFIX, Manifest, ManifestEntry, ProgramCache, write_manifest
from jaxserve.runner.state import StateProgram
from jaxserve.runner.warmup import MadeProgram, Progress


@dataclass(frozen=True, slots=True)
class Precompiled:
    """The contents of the filled directory."""

    manifest: Manifest
    kv_cache_bytes: int
    """The size that the programs were compiled for: another size needs other programs."""


def precompile(
    config: Config, model_path: Path, directory: Path, settings: dict[str, str], progress: Progress
) -> Precompiled:
    """Put every program that `config` needs on this host into `directory`, with a manifest.

    settings: the settings that made `config`, for the manifest. Raises StartupError in one line.
    """
    config.model.check_generates()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {directory}: {error.strerror}") from None
    cache = ProgramCache(directory)
    if cache.directory is None:
        raise ConfigError(f"--output {directory}: not a directory that can be trusted (see the warning above)")
    mmproj = resolve_tower(config.images)
    decoder, checkpoint = read_decoder(model_path, mmproj)
    decoder = with_served_images(config.images, decoder, model_path, checkpoint, mmproj)
    there = replace(config, compile=replace(config.compile, compile_cache=str(directory)))
    config = with_tested_kernels(there, decoder, PhaseClock(), lambda *_: None)
    hf = text_model(model_path, checkpoint)
    adapters = adapters_config(open_adapters(config, decoder, hf), config.model, decoder)
    prepared = prepare(config, decoder, adapters, draft=read_draft_config(config, model_path))
    steps, state_programs = prepared.make_programs(cache, progress), prepared.make_state_programs(cache)
    made: list[tuple[Program | StateProgram, MadeProgram]] = [*steps.items(), *state_programs.items()]
    entries = [_entry(program.name, result, cache, directory) for program, result in made]
    if (measuring := prepared.make_kv_scales(cache)) is not None:
        entries.append(_entry("kv_scales", measuring.made, cache, directory))
    manifest = Manifest(FORMAT, str(config.model.model), prepared.key_parts(), settings, entries)
    write_manifest(directory, manifest)
    return Precompiled(manifest, prepared.limits.cache.num_bytes)


def _entry(name: str, made: MadeProgram, cache: ProgramCache, directory: Path) -> ManifestEntry:
    num_bytes = cache.num_bytes(made.key)
    if num_bytes is None:
        raise StartupError(f"--output {directory}: program {name} could not be written")
    seconds = round(made.seconds, 3) if made.source == "compiled" else None
    return ManifestEntry(name, made.key + SUFFIX, num_bytes, seconds)
