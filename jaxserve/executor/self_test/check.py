"""Decides if this host's kernels need a self-test, runs it in a process of its own, and acts on the verdict."""

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
from jaxserve.executor.self_test.process import SelfTestReport, SelfTestSpec
from jaxserve.ipc.report import PhaseClock
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.runner.limits import mesh_shape
from jaxserve.runner.program_cache import cache_directory, trusted_directory, write_whole
from jaxserve.runner.program_key import source_hash
from jaxserve.types import ACCELERATOR_FILES

_LOG = logging.getLogger(__name__)
_COMMAND: Final = (sys.executable, "-m", "jaxserve.executor.self_test.process")
TIMEOUT_S: Final = 150.0
SUFFIX: Final = ".self-test"
PHASE: Final = "trial"
"""The phase's published name, in start-up reports."""


def with_tested_kernels(config: Config, decoder: DecoderConfig, clock: PhaseClock, progress: Progress) -> Config:
    """Return `config` without kernels that fail here. Call it before this process takes the devices.

    Raises ConfigError if kernels that the user asked for fail.
    """
    wanted = config.compile.attention_backend
    if not config.compile.try_kernels or wanted == "reference" or not _has_accelerator():
        return config
    spec = SelfTestSpec(config, decoder)
    mark = _mark(spec)
    if mark is not None and mark.exists():
        return config
    progress(PHASE, 0, 1, "")
    with clock.phase(PHASE):
        report = run_self_test(spec)
    progress(PHASE, 1, 1, "")
    if report is None:
        return config
    if report.error is None:
        if mark is not None and report.device != "cpu":  # the accelerator may be there next time
            _write(mark)
        return config
    if wanted == "pallas":
        raise ConfigError(f"--attention-backend pallas: its kernels fail here: {report.error}; use auto or reference")
    _LOG.warning("%s: kernels fail here, attention is left to XLA: %s", report.device, report.error)
    return replace(config, compile=replace(config.compile, attention_backend="reference"))


def run_self_test(
    spec: SelfTestSpec, command: Sequence[str] = _COMMAND, timeout_s: float = TIMEOUT_S
) -> SelfTestReport | None:
    """Return the last report of a self-test; None, with a warning, if it ended before it called the kernels."""
    started = time.monotonic()
    try:
        reports, end = _reports(spec, command, timeout_s)
    except OSError as error:  # most often a full disk
        reports, end = [], f"cannot be run: {error.strerror}"
    if not reports:
        _LOG.warning("kernels are used untested, their self-test %s", end)
        return None
    report = reports[-1]
    if report.kind == "reference":
        return SelfTestReport("verdict", report.device, f"their self-test {end}")
    if report.difference is not None and report.error is None:
        _LOG.info(
            "%s: kernels passed their self-test in %.0f s: at most %.2g of a vector's length from XLA's results",
            report.device,
            time.monotonic() - started,
            report.difference,
        )
    return report


def _reports(spec: SelfTestSpec, command: Sequence[str], timeout_s: float) -> tuple[list[SelfTestReport], str]:
    """Return the reports of the process, and how it ended, with its last line if there is no report."""
    with tempfile.TemporaryFile() as question, tempfile.TemporaryFile() as answers, tempfile.TemporaryFile() as errors:
        question.write(msgspec.json.encode(spec))
        question.seek(0)
        end = _run(command, question, answers, errors, timeout_s)
        answers.seek(0)
        reports = [msgspec.json.decode(line, type=SelfTestReport) for line in answers]
        return reports, end if reports else f"{end}: {_last_line(errors)}"


def _run(command: Sequence[str], question: IO[bytes], answers: IO[bytes], errors: IO[bytes], timeout_s: float) -> str:
    """Return how the process ended, in words that follow "their self-test"."""
    try:
        code = subprocess.run(
            command, stdin=question, stdout=answers, stderr=errors, timeout=timeout_s, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return f"gave no answer in {timeout_s:g} s"
    return f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = [line for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "nothing on stderr"


def _has_accelerator() -> bool:
    """Read from device files: JAX would take the devices."""
    if jax.config.jax_platforms == "cpu":  # type: ignore[attr-defined]
        return False
    return any(found for pattern in ACCELERATOR_FILES for found in Path("/dev").glob(pattern))


def _mark(spec: SelfTestSpec) -> Path | None:
    """Return the file that marks these kernels as tested here; None without a compile cache."""
    directory = cache_directory(spec.config.compile.compile_cache)
    directory = None if directory is None else trusted_directory(directory)
    if directory is None:
        return None
    config = spec.config
    of_model = (spec.decoder, config.model.dtype, config.model.quantization, config.cache.block_size)
    scheduler = (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens)
    of_engine = (
        config.cache.kv_cache_dtype,
        mesh_shape(config.parallel),
        config.model.max_model_len,
        scheduler,
    )
    of_host = (source_hash(), version("jax"), version("jaxlib"), _drivers())
    return directory / f"{hashlib.sha256(repr((of_model, of_engine, of_host)).encode()).hexdigest()}{SUFFIX}"


def _drivers() -> tuple[str, ...]:
    """Return NVIDIA's driver version and GPU models, without serial numbers and addresses."""
    nvidia = Path("/proc/driver/nvidia")
    files = [nvidia / "version", *sorted(nvidia.glob("gpus/*/information"))]
    lines = (line for file in files if file.is_file() for line in file.read_text(errors="replace").splitlines())
    return tuple(line for line in lines if line.startswith(("NVRM", "Model", "Video BIOS")))


def _write(mark: Path) -> None:
    try:
        write_whole(mark, b"")
    except OSError as error:  # a read-only cache: tested again next time
        _LOG.info("not noted in the compile cache: %s", error)
