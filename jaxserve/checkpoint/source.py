"""Find a model, or the image encoder of one: a local path, or a Hugging Face hub id downloaded to the hub's cache; and make the folder
of a model whose config.json `--hf-overrides` changes."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from jaxserve.checkpoint.files import INDEX_FILE, MODEL_OPTIMIZER, TIKTOKEN, expect_tokenizer_files, read_object
from jaxserve.checkpoint.gguf.split import part_names
from jaxserve.checkpoint.image_processor import FILES as PROCESSOR_FILES
from jaxserve.checkpoint.maxtext.folder import is_orbax
from jaxserve.checkpoint.sentence.folders import modules_directory, transformer_folder
from jaxserve.config.images import ImagesConfig
from jaxserve.config.model import ModelConfig
from jaxserve.errors import CheckpointError, ConfigError, shown

_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<file>[^:]+\.gguf))?", re.ASCII)

_TEXT_PATTERNS = [
    "*.json",
    "tokenizer*",
    "vocab.txt",
    "merges.txt",
    TIKTOKEN,
    "*.jinja",
    "0_*/tokenizer*",
    "0_*/vocab.txt",
]
_MODULE_CONFIGS = ["modules.json", "sentence_bert_config.json", "[0-9]_*/config.json"]
"""Files of sentence-transformers that describe what comes after a model."""
_SHARDS = "model*.safetensors"
_DIRECTORY_PATTERNS = [_SHARDS, f"[0-9]_*/{_SHARDS}", *_TEXT_PATTERNS]
"""Files of a safetensors model: no pickle, no second copy of the weights."""
_IGNORED_PATTERNS = ["[!0-9a]*/*", "[0-9][!_]*/*", "a[!d]*/*", "ad[!d]*/*"]
"""Subdirectories except sentence-transformers' modules, such as `1_Pooling`, and `additional_chat_templates`: a `*` also matches
slashes."""
_ADAPTER_PATTERNS = ["adapter_config.json", "adapter_model.safetensors"]
_CONFIG_PATTERNS = [
    "config.json",
    MODEL_OPTIMIZER,
    "generation_config.json",
    "tokenizer_config.json",
    *PROCESSOR_FILES,
    *_MODULE_CONFIGS,
]
"""Files that describe a safetensors model."""
_CONFIG: Final = "config.json"
_ORIGINAL: Final = "original-config.json"
"""Link to the config.json of a model, beside the folder with the one that `--hf-overrides` changed."""
DEFAULT_OVERRIDES_DIRECTORY: Final = "~/.cache/jaxserve/overrides"


def resolve(
    model: str,
    revision: str | None = None,
    *,
    weights: bool = True,
    progress: bool = True,
    needs_tokenizer: bool = True,
) -> Path:
    """Return the local path of a model: an existing file or directory, or the snapshot of a hub id.

    Of a model that sentence-transformers saved in a folder (`0_Transformer`) it is that folder. A hub id is `owner/name`, or
    `owner/name:FILE.gguf` for one GGUF file of that repository, or for all files of a split model by its first; `revision` is a
    branch, tag or commit of it. Files already in the hub's cache are used without a network. `progress` shows the
    hub's own bars on stderr. Without `weights` only a repository's config is fetched; a GGUF model has it inside and is
    fetched whole. needs_tokenizer: do not fetch the weights of a repository whose tokenizer cannot be read. Raises ConfigError if
    `model` cannot be a source and CheckpointError if it cannot be downloaded.
    """
    path = _existing(model)
    if path is not None:
        return transformer_folder(path)
    repository, file_name = hub_id(model)
    described = _DIRECTORY_PATTERNS if weights else _CONFIG_PATTERNS
    files = part_names(file_name) if file_name else []
    patterns = [glob.escape(file) for file in files] or described
    if weights and file_name is None:
        texts = _download(repository, revision, _TEXT_PATTERNS, progress)
        if needs_tokenizer:
            expect_tokenizer_files(transformer_folder(texts), f"model {repository}")
        patterns = [*described, *_other_shards(texts / INDEX_FILE)]
    snapshot = _download(repository, revision, patterns, progress)
    if file_name is None:
        snapshot = transformer_folder(snapshot)
        if weights and not any(snapshot.glob("*.safetensors")):
            raise CheckpointError(
                f"model {model}: expected {_SHARDS} in the repository, found none (pickle weights are not "
                f"read); choose a repository with safetensors, or one GGUF file as {repository}:FILE.gguf"
            )
        return snapshot
    for file in files:
        if not (snapshot / file).is_file():
            raise CheckpointError(f"model {model}: expected {shown(file)} in the repository, found no such file")
    return snapshot / file_name


def resolve_model(settings: ModelConfig, *, weights: bool = True) -> Path:
    """Return the local path of the model to serve, with the config.json of `--hf-overrides`.

    weights: False fetches only the config of a repository of the hub. Raises as `resolve` and `overridden` do.
    """
    return overridden(resolve(settings.model, settings.revision, weights=weights), settings)


def overridden(path: Path, settings: ModelConfig) -> Path:
    """Return the folder of the model at `path` with the config.json that `--hf-overrides` makes of its own: a folder of links to
    its other files; `path` itself without overrides.

    So every reader of the folder, in any process, sees the same config. The folder is named by its content and never changed. Raises
    ConfigError in one line for a model that has no config.json, and if the folder cannot be written.
    """
    if settings.hf_overrides is None:
        return path
    if not (path / _CONFIG).is_file() or is_orbax(path):
        what = (
            "the metadata of a GGUF file decides"
            if path.is_file()
            else "only that of a Hugging Face directory is changed"
        )
        raise ConfigError(f"--hf-overrides: {path} has no {_CONFIG} to change: {what}")
    path = path.resolve() if path.name == ".." else path.absolute()
    text = json.dumps(_merged(read_object(path / _CONFIG), settings.overrides, ""), indent=2)
    around = modules_directory(path)
    groups = {".": [] if around in (None, path) else _others(around, path.name), path.name: _others(path, _CONFIG)}
    content = hashlib.sha256(repr((str(path), groups, text)).encode()).hexdigest()
    directory = Path(settings.hf_overrides_dir or DEFAULT_OVERRIDES_DIRECTORY)
    try:
        directory = directory.expanduser().absolute()
        place = directory / content[:32]
        if not place.is_dir():
            _write_links(place, path, groups, text)
    except (OSError, RuntimeError) as error:  # RuntimeError: ~ of a user without a home directory
        raise ConfigError(
            f"--hf-overrides-dir {directory}: cannot be written, and holds what --hf-overrides changes: {error}"
        ) from error
    return place / path.name


def original_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of the model whose folder with overrides is `folder`, as it is without them."""
    return read_object(folder.parent / _ORIGINAL)


def _others(folder: Path, name: str) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.name != name)


def _write_links(place: Path, path: Path, groups: Mapping[str, list[str]], config: str) -> None:
    """Make the folder `place` as a whole: `groups` has the names of the entries to link, those beside the model at `path` and its own."""
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=place.parent))
    try:
        for folder, names in groups.items():
            (partial / folder).mkdir(exist_ok=True)
            for name in names:
                (partial / folder / name).symlink_to((path.parent if folder == "." else path) / name)
        (partial / _ORIGINAL).symlink_to(path / _CONFIG)
        with (partial / path.name / _CONFIG).open("w", encoding="utf-8") as file:
            file.write(config)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(place)
    except OSError:
        if not place.is_dir():  # another process made the same one
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _merged(config: Mapping[str, Any], changes: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return a table of config.json with the values of `changes`, those of tables within it one by one. prefix: of names in errors."""
    merged = dict(config)
    for key, value in changes.items():
        name = prefix + key
        if name == "classifier_from_token":
            raise ConfigError(f"--hf-overrides: {name}: use --classifier-from-token, without another architecture")
        if key == "rope_scaling" and value and not config.get(key) and config.get("rope_parameters"):
            raise ConfigError(
                f"--hf-overrides: {name}: config.json has rope_parameters, whose rope_theta it would hide; change that table"
            )
        own = config.get(key)
        merged[key] = (
            _merged(own if isinstance(own, dict) else {}, value, f"{name}.") if isinstance(value, dict) else value
        )
    return merged


def _other_shards(index: Path) -> list[str]:
    """Return patterns of the shards that an index names and `_SHARDS` does not match, such as `layers-0.safetensors` of Qwen3.6 in FP8."""
    table = read_object(index).get("weight_map") if index.is_file() else None
    names = table.values() if isinstance(table, dict) else ()
    return sorted({glob.escape(name) for name in names if isinstance(name, str) and not fnmatch(name, _SHARDS)})


def resolve_tower(images: ImagesConfig, *, progress: bool = False) -> Path | None:
    """Return the local path of the GGUF file with a model's image encoder; None without one, or if no image is served.

    Raises ConfigError and CheckpointError naming the setting.
    """
    if images.mmproj is None or not images.max_images:
        return None
    try:
        return resolve(images.mmproj, progress=progress)
    except ConfigError as error:
        raise ConfigError(
            f"--mmproj {shown(images.mmproj, 200)}: expected an existing file, or owner/name:FILE.gguf"
        ) from error
    except CheckpointError as error:
        raise CheckpointError(f"--mmproj {images.mmproj}: {error}") from error


def hub_id(model: str) -> tuple[str, str | None]:
    """Return the repository of a hub id, and the GGUF file if it names one, of a split model the first. Raises ConfigError if `model`
    is none, or names another file of a split model."""
    match = _HUB_ID.fullmatch(model)
    if match is None or (match["file"] is None and model.endswith(".gguf")):
        raise ConfigError(
            f"model {shown(model, 200)}: expected an existing file or directory, owner/name on the Hugging Face hub, "
            "or owner/name:FILE.gguf; found no such path"
        )
    file = match["file"]
    if file is not None and file != (first := part_names(file)[0]):
        raise ConfigError(f"model {model}: is not the first file of a split model; give {match['repo']}:{first}")
    return match["repo"], file


def resolve_adapter(adapter: str) -> Path:
    """Return the local path of an adapter: an existing folder, or the snapshot of a hub id."""
    path = _existing(adapter)
    if path is not None:
        return path
    match = _HUB_ID.fullmatch(adapter)
    if match is None or match["file"] is not None:
        raise ConfigError(
            f"adapter {shown(adapter, 200)}: expected an existing folder, or owner/name on the Hugging Face hub; "
            "found no such path"
        )
    return _download(match["repo"], None, _ADAPTER_PATTERNS, progress=True, kind="adapter")


def _existing(model: str) -> Path | None:
    try:
        path = Path(model).expanduser()
        return path if model and path.exists() else None
    except (OSError, RuntimeError):  # an impossible name, an unreadable folder, ~ of an unknown user
        return None


def _download(repository: str, revision: str | None, patterns: list[str], progress: bool, kind: str = "model") -> Path:
    # Here: 0.3 s that a local path need not spend.
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub import errors as hub_errors

    at_revision = f" at revision {shown(revision)}" if revision else ""
    subject = f"{kind} {repository}{at_revision}"
    if constants.HF_HUB_CACHE.startswith("~"):
        raise ConfigError(f"{subject}: this user has no home directory to keep it in; set HF_HOME to a folder")
    try:
        with _bars(progress):
            snapshot = huggingface_hub.snapshot_download(
                repository,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=[] if "/" in patterns[0] else _IGNORED_PATTERNS,
            )
        return Path(snapshot)
    except hub_errors.GatedRepoError as error:
        raise CheckpointError(
            f"{subject}: the repository is gated; accept its terms on https://huggingface.co/{repository} "
            "and set HF_TOKEN (or run `hf auth login`)"
        ) from error
    except hub_errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{subject}: no such repository on the hub, or it is private; check the name, or set HF_TOKEN "
            "(or run `hf auth login`); a local model needs the path of an existing file or directory"
        ) from error
    except hub_errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{subject}: the repository has no such revision") from error
    except (hub_errors.OfflineModeIsEnabled, hub_errors.LocalEntryNotFoundError) as error:
        raise CheckpointError(f"{subject}: {_unreachable(error)}") from error
    except hub_errors.EntryNotFoundError as error:
        raise CheckpointError(f"{subject}: the repository has none of the files {', '.join(patterns)}") from error
    except hub_errors.HfHubHTTPError as error:
        raise CheckpointError(f"{subject}: the hub answered {_first_line(error)}; try again later") from error
    except hub_errors.HFValidationError as error:
        raise ConfigError(f"{subject}: not a hub id: {_first_line(error)}") from error
    except Exception as error:
        # The boundary to the hub's transports (httpx, xet, file locks), whose exceptions are not its API.
        raise CheckpointError(
            f"{subject}: the download failed ({type(error).__name__}: {_first_line(error)}); check the network "
            "and the free disk space, then try again: what is complete is kept"
        ) from error


def _unreachable(error: Exception) -> str:
    import huggingface_hub
    from huggingface_hub import errors as hub_errors

    cause = error.__cause__
    is_offline = huggingface_hub.constants.HF_HUB_OFFLINE or any(
        isinstance(reason, hub_errors.OfflineModeIsEnabled) for reason in (error, cause)
    )
    if is_offline:
        return "not wholly in the local cache, and HF_HUB_OFFLINE is set; unset it, or give a local path"
    because = f" ({type(cause).__name__}: {_first_line(cause)})" if cause is not None else ""
    return (
        f"not wholly in the local cache, and the hub cannot be reached{because}; check the network "
        "(HTTPS_PROXY and HF_ENDPOINT, where set), or give a local path"
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else "no details"


@contextmanager
def _bars(are_shown: bool) -> Iterator[None]:
    """Set the hub's process-wide switch for progress bars, and restore it afterwards."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
