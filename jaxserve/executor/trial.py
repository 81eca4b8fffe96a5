"""Kernels are tried before they are trusted: the first time a model of this shape meets this host's accelerators.

A process of its own computes a few steps with them and without (`runner.trial`). Where the results differ, or it crashes,
or gives no answer, attention is left to XLA, with a line that says so: slower, and right. Kernels that were found good
are not tried again, as long as source, versions, driver and model stay; that is noted in the compile cache.
"""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import IO, Final

import jax
import msgspec

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.executor.protocol import Progress
from jaxserve.executor.trial_process import TrialNews, TrialSpec
from jaxserve.ipc.report import PhaseClock
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.runner.cache_directory import cache_directory, trusted_directory
from jaxserve.runner.program_cache import write_whole
from jaxserve.runner.program_key import source_hash

_LOG = logging.getLogger(__name__)
_COMMAND: Final = (sys.executable, "-m", "jaxserve.executor.trial_process")
TIMEOUT_S: Final = 150.0
SUFFIX: Final = ".trial"
_DEVICES: Final = ("nvidia[0-9]*", "accel[0-9]*", "vfio/[0-9]*")
"""Device files of GPUs and TPUs."""


def with_tried_kernels(config: Config, decoder: DecoderConfig, clock: PhaseClock, progress: Progress) -> Config:
    """`config`, without kernels that fail here. To be asked before this process takes the devices.

    Raises ConfigError when kernels that were asked for fail.
    """
    wanted = config.compile.attention_backend
    if not config.compile.try_kernels or wanted == "reference" or not _has_accelerator():
        return config
    spec = TrialSpec(config, decoder)
    mark = _mark(spec)
    if mark is not None and mark.exists():
        return config
    progress("trial", 0, 1, "")
    with clock.phase("trial"):
        news = ask(spec)
    progress("trial", 1, 1, "")
    if news is None:
        return config
    if news.fault is None:
        if mark is not None and news.device != "cpu":  # the accelerator may be there next time
            _keep(mark)
        return config
    if wanted == "pallas":
        raise ConfigError(f"--attention-backend pallas: its kernels fail here: {news.fault}; use auto or reference")
    _LOG.warning("%s: kernels fail here, attention is left to XLA: %s", news.device, news.fault)
    return replace(config, compile=replace(config.compile, attention_backend="reference"))


def ask(spec: TrialSpec, command: Sequence[str] = _COMMAND, timeout_s: float = TIMEOUT_S) -> TrialNews | None:
    """The last news of a trial; None, with a warning, when it ended before it came to the kernels."""
    started = time.monotonic()
    with tempfile.TemporaryFile() as question, tempfile.TemporaryFile() as answers, tempfile.TemporaryFile() as errors:
        question.write(msgspec.json.encode(spec))
        question.seek(0)
        end = _run(command, question, answers, errors, timeout_s)
        answers.seek(0)
        told = [msgspec.json.decode(line, type=TrialNews) for line in answers]
        if not told:
            _LOG.warning("kernels are used untried, their trial %s: %s", end, _last_words(errors))
            return None
    news = told[-1]
    if news.kind == "reference":
        return TrialNews("verdict", news.device, f"their trial {end}")
    if news.difference is not None and news.fault is None:
        seconds = time.monotonic() - started
        _LOG.info(
            "%s: kernels tried in %.0f s: at most %.2g of a vector's length from XLA's results",
            news.device,
            seconds,
            news.difference,
        )
    return news


def _run(command: Sequence[str], question: IO[bytes], answers: IO[bytes], errors: IO[bytes], timeout_s: float) -> str:
    """How it ended, in words that follow "their trial"."""
    try:
        code = subprocess.run(
            command, stdin=question, stdout=answers, stderr=errors, timeout=timeout_s, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return f"gave no answer in {timeout_s:g} s"
    return f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"


def _last_words(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = [line for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "no word on stderr"


def _has_accelerator() -> bool:
    """Asked of files: JAX would take the devices."""
    if jax.config.jax_platforms == "cpu":  # type: ignore[attr-defined]
        return False
    return any(found for pattern in _DEVICES for found in Path("/dev").glob(pattern))


def _mark(spec: TrialSpec) -> Path | None:
    """The file that says that these kernels are good here; None without a place for it."""
    directory = cache_directory(spec.config.compile.compile_cache)
    directory = None if directory is None else trusted_directory(directory)
    if directory is None:
        return None
    config = spec.config
    of_model = (spec.decoder, config.model.dtype, config.model.quantization, config.cache.block_size)
    of_engine = (config.cache.kv_cache_dtype, config.parallel.tensor_parallel_size)
    of_host = (source_hash(), version("jax"), version("jaxlib"), _drivers())
    return directory / f"{hashlib.sha256(repr((of_model, of_engine, of_host)).encode()).hexdigest()}{SUFFIX}"


def _drivers() -> tuple[str, ...]:
    """What NVIDIA's driver says of itself and its GPUs, serial numbers and addresses left out."""
    nvidia = Path("/proc/driver/nvidia")
    files = [nvidia / "version", *sorted(nvidia.glob("gpus/*/information"))]
    lines = (line for file in files if file.is_file() for line in file.read_text(errors="replace").splitlines())
    return tuple(line for line in lines if line.startswith(("NVRM", "Model", "Video BIOS")))


def _keep(mark: Path) -> None:
    try:
        write_whole(mark, b"")
    except OSError as error:  # a read-only cache: tried again next time
        _LOG.info("not noted in the compile cache: %s", error)
