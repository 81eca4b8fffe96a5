"""Checks of this machine for a server of one model or several: each has a verdict, and a fix where something is wrong."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from jaxserve.checkpoint.files import INDEX_FILE
from jaxserve.checkpoint.gguf.split import gguf_files, part_names
from jaxserve.checkpoint.source import hub_id, overridden, resolve_tower
from jaxserve.config import Config
from jaxserve.errors import ConfigError, StartupError
from jaxserve.runner.host.cgroup import ROOT, cpu_quota
from jaxserve.runner.host.cores import num_cores
from jaxserve.runner.host.memory import available_bytes
from jaxserve.runner.program_cache import cache_directory, directory_problem
from jaxserve.runtime.environment import child_environment
from jaxserve.runtime.models.model_configs import model_name
from jaxserve.tools.found_devices import FoundDevices, NoDeviceError, find_devices

if TYPE_CHECKING:
    from jaxserve.tools.planning.devices import Device
    from jaxserve.tools.planning.plan import Plan

Verdict = Literal["ok", "note", "wrong"]
_PACKAGES: Final = ("jax", "jaxlib", "llguidance", "tokenizers", "aiohttp")
_NVIDIA: Final = Path("/proc/driver/nvidia")
_DRIVERS: Final = {13: 580, 12: 525}
"""The oldest NVIDIA driver for each version of CUDA that jax comes with."""
_GIB: Final = 1 << 30
_LITTLE_MEMORY: Final = 2 * _GIB
_LITTLE_SHARED_MEMORY: Final = _GIB
_PROCESS_MEMORY: Final = 384 << 20
"""An engine without its model, an API process and the one that starts it."""
_LITTLE_DISK: Final = 3 * _GIB
"""The compile cache takes up to 2 GiB."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    subject: str
    verdict: Verdict
    text: str
    fix: str = ""


def examine(configs: Sequence[Config]) -> list[Finding]:
    """Return the findings, in the order in which a start meets their subjects. configs: of each model of the server."""
    config, devices = configs[0], _found_devices()
    driver = _driver()
    findings = [
        _versions(config),
        *([] if driver is None else [driver]),
        _devices(devices),
        *_shared_memory(devices),
        _processors(config),
        _memory(config),
    ]
    if len(configs) == 1:
        findings += [*_models(config), *_start_memory(config, devices)]
    else:
        for one in configs:
            findings += [replace(each, subject=f"{each.subject} {model_name(one)}") for each in _models(one)]
        findings.append(_together(configs, devices))
    return [*findings, _cache(config), _port(config), _descriptors(config)]


def _versions(config: Config) -> Finding:
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in _PACKAGES)
    return Finding("versions", "ok", f"Python {sys.version.split()[0]}, {versions}")


def _driver(module: Path = _NVIDIA / "version") -> Finding | None:
    """Compare the NVIDIA driver with the CUDA of the installed jax; None if this machine has neither."""
    cuda = next((version for version in _DRIVERS if find_spec(f"jax_cuda{version}_plugin") is not None), None)
    wanted = None if cuda is None else _DRIVERS[cuda]
    text = module.read_text(encoding="utf-8", errors="replace") if module.is_file() else ""
    found = re.search(r"Module\b.*?\s((\d{3,})\.[\d.]+)", text)
    if found is None:
        if wanted is None:
            return None
        fix = f"install driver {wanted} or newer on the host, or set JAX_PLATFORMS=cpu"
        return Finding("driver", "note", f"none of NVIDIA's, and jax was installed for CUDA {cuda}", fix)
    if wanted is not None and int(found[2]) < wanted:
        text = f"NVIDIA {found[1]}; CUDA {cuda}, for which jax was installed, needs {wanted} or newer"
        return Finding("driver", "wrong", text, f"update the driver to {wanted} or newer")
    return Finding("driver", "ok", f"NVIDIA {found[1]}")


def _found_devices() -> FoundDevices | NoDeviceError:
    try:
        return find_devices()
    except NoDeviceError as error:
        return error


def _devices(found: FoundDevices | NoDeviceError) -> Finding:
    if isinstance(found, NoDeviceError):
        fix = "install the jax that fits the driver: pip install 'jaxserve[cuda]'"
        if found.is_hanging:
            fix = "reset the device or restart the machine; JAX_PLATFORMS=cpu serves without it"
        return Finding("devices", "wrong", str(found), fix)
    if found.platform != "cpu":
        return Finding("devices", "ok", f"{found.count} x {found.kind} ({found.platform})")
    wanted = child_environment().get("JAX_PLATFORMS", "").partition(",")[0]
    if wanted not in ("", "cpu"):
        fix = "give the container its devices (docker run --gpus all; --privileged for TPUs), or set JAX_PLATFORMS=cpu"
        return Finding("devices", "wrong", f"only the CPU, and JAX_PLATFORMS asks for {wanted}", fix)
    if _NVIDIA.exists():
        fix = "pip install 'jaxserve[cuda]', or look for JAX_PLATFORMS=cpu in the environment"
        return Finding("devices", "wrong", "only the CPU, beside an NVIDIA GPU", fix)
    return Finding("devices", "ok", "only the CPU")


def _shared_memory(found: FoundDevices | NoDeviceError, folder: Path = Path("/dev/shm")) -> list[Finding]:
    """Look at the size of /dev/shm if this machine has several GPUs: containers give 64 MiB by default."""
    if isinstance(found, NoDeviceError) or found.platform != "gpu" or found.count < 2 or not folder.is_dir():
        return []
    size = shutil.disk_usage(folder).total
    if size >= _LITTLE_SHARED_MEMORY:
        return []
    text = f"{folder} has {size >> 20} MiB: NCCL may pass data between GPUs there"
    return [Finding("shared memory", "note", text, "docker run --shm-size 1g, or a larger emptyDir in Kubernetes")]


def _processors(config: Config) -> Finding:
    quota, allowed = cpu_quota(ROOT), len(os.sched_getaffinity(0))
    limits = f"quota {quota:g}" if quota is not None else "no quota"
    text = f"{num_cores()} in use, {allowed} allowed of {os.cpu_count()}, {limits}"
    if quota is not None and quota < 1:
        return Finding("processors", "note", text, "a quota below one processor holds each step back: raise it")
    return Finding("processors", "ok", text)


def _memory(config: Config) -> Finding:
    available = available_bytes()
    text = f"{available / _GIB:.1f} GiB available"
    if available < _LITTLE_MEMORY:
        return Finding("memory", "note", text, "check the model with `jaxserve plan MODEL`, or raise the limit")
    return Finding("memory", "ok", text)


def _cache(config: Config) -> Finding:
    folder = cache_directory(config.compile.compile_cache)
    if folder is None:
        return Finding("compile cache", "note", "off: every start compiles all programs", "set --compile-cache DIR")
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    is_writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    if existing == folder:
        problem = directory_problem(folder)
        fix = f"chown {os.getuid()} {folder} and chmod 0700 {folder}, or --compile-cache DIR"
        if problem is not None:
            return Finding("compile cache", "wrong", f"{folder} is not used: {problem}", fix)
        if not is_writable:
            return Finding("compile cache", "note", f"{folder} is read-only: every start compiles what it lacks", fix)
    elif not is_writable:
        fix = f"chown {existing}, or --compile-cache DIR"
        return Finding("compile cache", "wrong", f"{existing} is not a directory that this user may write to", fix)
    programs = sum(1 for _ in folder.iterdir()) if existing == folder else 0
    free = shutil.disk_usage(existing).free
    text = f"{folder}: {programs} entries, {free / _GIB:.1f} GiB free"
    if free < _LITTLE_DISK:
        return Finding("compile cache", "note", text, "free some space: programs take up to 2 GiB")
    return Finding("compile cache", "ok", text)


def _port(config: Config) -> Finding:
    host, port = config.server.host, config.server.port
    address = f"{host}:{port}"
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except (OSError, UnicodeError) as error:  # UnicodeError: `a..b` is no name of a host
        fix = "give an address of this machine with --host, and with --port a port that this user may take"
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            fix = "`jaxserve status` shows a server there; choose another with --port, or `jaxserve upgrade`"
        return Finding("port", "wrong", f"{address}: {getattr(error, 'strerror', None) or error}", fix)
    is_open = host in ("0.0.0.0", "::") and config.server.api_key is None and config.server.api_key_file is None
    if is_open:
        fix = "set --api-key-file, or --host 127.0.0.1"
        return Finding("port", "note", f"{address} is free, but open to the network without a key", fix)
    return Finding("port", "ok", f"{address} is free")


def _descriptors(config: Config) -> Finding:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = config.server.max_connections
    if hard != resource.RLIM_INFINITY and hard <= wanted:
        text = f"{hard} descriptors for {wanted} connections (--max-connections)"
        return Finding("open files", "note", text, f"ulimit -Hn {wanted + 256}, or lower --max-connections")
    return Finding("open files", "ok", "no limit" if hard == resource.RLIM_INFINITY else f"up to {hard}")


def _models(config: Config) -> list[Finding]:
    """Look at a model, and for a file of --mmproj of the hub at its cache."""
    tower = _hub_tower(config)
    return [_model(config)] if tower is None else [_model(config), replace(_hub_model(tower, None), subject="mmproj")]


def _model(config: Config) -> Finding:
    """Look at the files of a local model and its image encoder, or for a model of the hub at its cache."""
    path = Path(config.model.model).expanduser()
    if not path.exists():
        return _hub_model(config.model.model, config.model.revision)
    from jaxserve.models.registry import open_model  # imports jax, which takes seconds

    try:
        tower = None if _hub_tower(config) else resolve_tower(config.images)
        open_model(overridden(path, config.model), tower)
    except StartupError as error:
        return Finding("model", "wrong", str(error), "`jaxserve plan MODEL` explains what can be loaded")
    files = gguf_files(path) if path.is_file() else list(path.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in (files if tower is None else [*files, tower]))
    names = path.name if tower is None else f"{path.name} with {tower.name}"
    return Finding("model", "ok", f"{names}: {size / _GIB:.2f} GiB")


def _hub_tower(config: Config) -> str | None:
    """Return the hub id of --mmproj; None if it is none, which a local path may be, or if no image is served."""
    tower = config.images.mmproj
    if tower is None or not config.images.max_images or Path(tower).expanduser().exists():
        return None
    try:
        hub_id(tower)
    except ConfigError:
        return None
    return tower


def _hub_model(model: str, revision: str | None) -> Finding:
    """Look whether the weights of a model of the hub are in its cache, or can be fetched into it."""
    from huggingface_hub import constants  # takes 0.3 s

    try:
        repository, file = hub_id(model)
    except ConfigError as error:
        return Finding("model", "wrong", str(error), "`jaxserve models` lists those on this machine")
    cache = Path(constants.HF_HUB_CACHE)
    named = f"{model} at revision {revision}" if revision else model
    names, num_missing = _cached_weights(cache / f"models--{repository.replace('/', '--')}", revision or "main", file)
    if names and not num_missing:
        return Finding("model", "ok", f"{named} is in {cache}")
    lacks = f"{num_missing} of {len(names)} files with weights of {named} are" if names else f"{named} is"
    if constants.HF_HUB_OFFLINE:
        return Finding("model", "wrong", f"{lacks} not in {cache}, and HF_HUB_OFFLINE is set", "unset it")
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        return Finding("model", "wrong", f"{existing} is not writable: {named} cannot be fetched", "set HF_HOME=DIR")
    text = f"{lacks} not in {cache}, which has {shutil.disk_usage(existing).free / _GIB:.1f} GiB free"
    return Finding("model", "note", text, "it is fetched from the hub at the start; HF_HOME=DIR puts it elsewhere")


class _Index(msgspec.Struct):
    """The file that says in which file of a checkpoint each tensor is."""

    weight_map: dict[str, str]


def _cached_weights(folder: Path, revision: str, file: str | None) -> tuple[Sequence[str], int]:
    """Return the files with weights that a repository has at a branch, tag or commit, and how many its folder in the hub's cache lacks.

    file: of GGUF; of a split model the first. No files: the cache does not say which there are.
    """
    reference = folder / "refs" / revision
    commit = reference.read_text(encoding="ascii").strip() if reference.is_file() else revision
    snapshot = folder / "snapshots" / commit
    names = part_names(file) if file else ["model.safetensors"]
    index = snapshot / INDEX_FILE
    if file is None and not (snapshot / names[0]).is_file() and index.is_file():
        try:
            names = sorted(set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()))
        except msgspec.DecodeError:
            names = []
    missing = [name for name in names if not (snapshot / name).is_file()]
    return ([], 0) if len(names) == len(missing) else (names, len(missing))


def _together(configs: Sequence[Config], found: FoundDevices | NoDeviceError) -> Finding:
    """Plan all models on the devices of this machine, as the server divides them."""
    subject, look = "all models", "`jaxserve plan` with the same models and settings shows what would fit"
    for config in configs:
        if not Path(config.model.model).expanduser().exists() or _hub_tower(config):
            text = f"not checked: {model_name(config)} is fetched from the hub at the start"
            return Finding(subject, "note", text, "`jaxserve plan` with the same models reads their configs only")
    if isinstance(found, NoDeviceError) or (found.platform != "cpu" and found.limit_bytes is None):
        return Finding(subject, "note", "not checked: the memory of the devices is not known", look)
    from jaxserve.tools.planning.machine import Machine  # imports jax, which takes seconds
    from jaxserve.tools.planning.server_plan import make_server_plan

    machine = Machine(_described(found), None if found.platform == "cpu" else found.count)
    try:
        plan = make_server_plan(configs, machine, compiles=False, has_speeds=False)
    except StartupError as error:
        return Finding(subject, "wrong", str(error), look)
    if not plan.fits:
        changes = [change for change in plan.advice if not change.startswith("--device")]
        return Finding(subject, "wrong", f"do not fit together: {plan.reason}", "; or ".join([*changes, look]))
    limit = max(one.device.limit_bytes for one in plan.models.values())
    sizes = ", ".join(f"{name} {_held_bytes(one) / _GIB:.2f}" for name, one in plan.models.items())
    where = f"of {limit / _GIB:.1f} GiB" if plan.sharing == "memory" else "GiB, each on devices of its own"
    return Finding(subject, "ok", f"fit together: {sizes} {where}, estimated")


def _start_memory(config: Config, found: FoundDevices | NoDeviceError) -> list[Finding]:
    """Compare the memory of a CPU with what the first start of a local model in one engine takes; nothing if it suffices."""
    if isinstance(found, NoDeviceError) or found.platform != "cpu" or config.parallel.replicas > 1:
        return []
    if _hub_tower(config) or not Path(config.model.model).expanduser().exists():
        return []
    from jaxserve.runner.memory import START_BYTES  # imports jax, which takes seconds
    from jaxserve.tools.planning.machine import Machine
    from jaxserve.tools.planning.server_plan import make_server_plan

    subject = "memory of a start"
    try:
        plan = make_server_plan([config], Machine(_described(found), None), compiles=False, has_speeds=False)
    except StartupError:
        return []  # the finding on the model has the reason
    (one,) = plan.models.values()
    if not one.fits:
        return [Finding(subject, "wrong", str(one.reason), "`jaxserve plan MODEL` says what would fit")]
    held = _held_bytes(one)
    needed = held + START_BYTES + _PROCESS_MEMORY
    available = available_bytes()
    if needed <= available:
        return []
    text = (
        f"{available / _GIB:.2f} GiB available; the model takes {held / _GIB:.2f}, with compiling and processes about"
    )
    fix = (
        f"a memory limit {(needed - available) / _GIB:.2f} GiB larger, or a lower --kv-cache-memory or --max-model-len"
    )
    return [Finding(subject, "note", f"{text} {needed / _GIB:.2f}", fix)]


def _held_bytes(plan: Plan) -> int:
    """Return the bytes that an engine takes in one memory."""
    memory = plan.memory
    return 0 if memory is None else memory.limit_bytes - memory.free_bytes


def _described(found: FoundDevices) -> Device:
    """Return the device as plans describe devices, with the memory that it reports."""
    from jaxserve.tools.planning.devices import CudaChip, Device, find_device

    if found.platform == "cpu":
        return find_device("cpu")
    chip = None if found.capability is None else CudaChip(found.capability, 0, 0, 0.0, 0, 0, 0)
    platform: Literal["gpu", "tpu"] = "gpu" if found.platform == "gpu" else "tpu"
    return Device(found.kind, found.kind, platform, found.limit_bytes or 0, 1.0, found.count, 0.0, None, cuda=chip)
