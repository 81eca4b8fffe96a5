"""Fills a compile cache without loading a model: programs follow from shapes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxserve.config import Config
from jaxserve.errors import ConfigError, StartupError
from jaxserve.executor.preparation import prepare
from jaxserve.models.registry import read_decoder
from jaxserve.runner.manifest import FORMAT, Manifest, ManifestEntry, write_manifest
from jaxserve.runner.program_cache import SUFFIX, ProgramCache
from jaxserve.runner.warmup import Progress


@dataclass(frozen=True, slots=True)
class Precompiled:
    """What was left in the directory."""

    manifest: Manifest
    kv_cache_bytes: int
    """What the programs were compiled for: another size would need others."""


def precompile(
    config: Config, model_path: Path, directory: Path, settings: dict[str, str], progress: Progress
) -> Precompiled:
    """Put every program that `config` needs on this host into `directory`, and a manifest beside them.

    settings: what `config` was made of, for the manifest. Raises StartupError in one line.
    """
    config.model.check_generates()
    directory.mkdir(parents=True, exist_ok=True)
    cache = ProgramCache(directory)
    if cache.directory is None:
        raise ConfigError(f"--output {directory}: not a directory that can be trusted (see the warning above)")
    decoder, _ = read_decoder(model_path)
    prepared = prepare(config, decoder)
    made = prepared.make_programs(cache, progress)
    entries = []
    for program, result in made.items():
        num_bytes = cache.num_bytes(result.key)
        if num_bytes is None:
            raise StartupError(f"--output {directory}: program {program.name} could not be written")
        seconds = round(result.seconds, 3) if result.source == "compiled" else None
        entries.append(ManifestEntry(program.name, result.key + SUFFIX, num_bytes, seconds))
    manifest = Manifest(FORMAT, str(config.model.model), prepared.facts(), settings, entries)
    write_manifest(directory, manifest)
    spec = prepared.limits.spec
    return Precompiled(manifest, prepared.limits.num_blocks * spec.bytes_per_block)
