"""Checks of this machine for a server with a config: each has a verdict, and a fix where something is wrong."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final, Literal

from jaxserve.config import Config
from jaxserve.errors import StartupError
from jaxserve.runner.host.cgroup import ROOT, cpu_quota
from jaxserve.runner.host.cores import num_cores
from jaxserve.runner.host.memory import available_bytes
from jaxserve.runner.program_cache import cache_directory
from jaxserve.runtime.environment import child_environment

Verdict = Literal["ok", "note", "wrong"]
_PACKAGES: Final = ("jax", "jaxlib", "llguidance", "tokenizers", "aiohttp")
_DEVICE_TIMEOUT_S: Final = 60.0
_DEVICE_PROGRAM: Final = (
    "import json, jax; found = jax.devices(); print(json.dumps([len(found), found[0].platform, found[0].device_kind]))"
)
_GIB: Final = 1 << 30
_LITTLE_MEMORY: Final = 2 * _GIB
_LITTLE_DISK: Final = 3 * _GIB
"""The compile cache takes up to 2 GiB."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    subject: str
    verdict: Verdict
    text: str
    fix: str = ""


def examine(config: Config) -> list[Finding]:
    """Return the findings, in the order in which a start meets their subjects."""
    return [check(config) for check in _CHECKS]


def _versions(config: Config) -> Finding:
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in _PACKAGES)
    return Finding("versions", "ok", f"Python {sys.version.split()[0]}, {versions}")


def _devices(config: Config) -> Finding:
    """Ask jax in a process of its own: a driver that hangs must not hang this one."""
    command = [sys.executable, "-c", _DEVICE_PROGRAM]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_DEVICE_TIMEOUT_S, env=child_environment(), check=False
        )
    except subprocess.TimeoutExpired:
        fix = "reset the device or restart the machine; JAX_PLATFORMS=cpu serves without it"
        return Finding("devices", "wrong", f"jax found none within {_DEVICE_TIMEOUT_S:g} s: the driver hangs", fix)
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1][:300]
        return Finding("devices", "wrong", reason, "install the jax that fits the driver: pip install 'jaxserve[cuda]'")
    count, platform, kind = json.loads(result.stdout.splitlines()[-1])
    if platform != "cpu":
        return Finding("devices", "ok", f"{count} x {kind} ({platform})")
    wanted = child_environment().get("JAX_PLATFORMS", "").partition(",")[0]
    if wanted not in ("", "cpu"):
        fix = "give the container its devices (docker run --gpus all; --privileged for TPUs), or set JAX_PLATFORMS=cpu"
        return Finding("devices", "wrong", f"only the CPU, and JAX_PLATFORMS asks for {wanted}", fix)
    if Path("/proc/driver/nvidia").exists():
        fix = "pip install 'jaxserve[cuda]', or look for JAX_PLATFORMS=cpu in the environment"
        return Finding("devices", "wrong", "only the CPU, beside an NVIDIA GPU", fix)
    return Finding("devices", "ok", "only the CPU")


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
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        return Finding(
            "compile cache", "wrong", f"{existing} is not writable", f"chown {existing}, or --compile-cache DIR"
        )
    if folder.exists() and folder.stat().st_mode & 0o022:
        return Finding(
            "compile cache", "wrong", f"others may write to {folder}: it is not used", f"chmod go-w {folder}"
        )
    programs = sum(1 for _ in folder.iterdir()) if folder.exists() else 0
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
    except OSError as error:
        fix = "`jaxserve status` shows a server there; choose another with --port, or `jaxserve upgrade`"
        return Finding("port", "wrong", f"{address}: {error.strerror or error}", fix)
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


def _model(config: Config) -> Finding:
    """Look at a local model's files; a hub id is left to the start."""
    path = Path(config.model.model).expanduser()
    if not path.exists():
        return Finding(
            "model", "note", f"{config.model.model} is not a local path", "it is fetched from the hub at the start"
        )
    from jaxserve.models.registry import open_model  # imports jax, which takes seconds

    try:
        open_model(path)
    except StartupError as error:
        return Finding("model", "wrong", str(error), "`jaxserve plan MODEL` explains what can be loaded")
    size = sum(file.stat().st_size for file in ([path] if path.is_file() else path.glob("*.safetensors")))
    return Finding("model", "ok", f"{path.name}: {size / _GIB:.2f} GiB")


_CHECKS: Final[Sequence[Callable[[Config], Finding]]] = (
    _versions,
    _devices,
    _processors,
    _memory,
    _model,
    _cache,
    _port,
    _descriptors,
)
