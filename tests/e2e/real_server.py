"""`jaxserve serve` as users start it, on a small real model: both processes, real programs, a private program cache."""

from __future__ import annotations

import contextlib
import fcntl
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.http_server import Server, await_ready, launched
from tests.models.goldens import GoldenCheckpoint, golden_checkpoint
from tests.smollm2 import FLAGS
from tests.unit.checkpoint.checkpoint_files import smollm2_file

MODEL = "llama3_tiny"
COLD_START_TIMEOUT_S = 280.0
FEW_PROGRAMS = ("--max-num-seqs", "1", "--max-num-batched-tokens", "16")
"""For servers that are started to see them start and end."""
BATCH_PROGRAMS = ("--max-num-seqs", "16", "--max-num-batched-tokens", "32")


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources of one process, as the kernel counts them."""

    resident_bytes: int
    num_descriptors: int
    num_threads: int
    cpu_ticks: int
    """Processor time of all threads, in user and kernel mode."""
    num_switches: int
    """Times that a thread gave up its processor, to wait or because its time slice was over."""


def model() -> GoldenCheckpoint:
    """The model that is served, with transformers' outputs."""
    return golden_checkpoint(MODEL)


@contextlib.contextmanager
def serving(*words: str, programs: Path, cpu_kernels: str = "xla") -> Iterator[Server]:
    """A ready `jaxserve serve WORDS` on a free port. programs: the program cache."""
    with tempfile.TemporaryDirectory(prefix="jaxserve-test-", ignore_cleanup_errors=True) as sockets:
        command = [sys.executable, "-m", "jaxserve.cli.main", "serve", *words, "--port", "0"]
        command += ["--compile-cache", str(programs), "--uds-dir", sockets, "--cpu-kernels", cpu_kernels]
        with launched(command) as server:
            await_ready(server, COLD_START_TIMEOUT_S)
            yield server


@contextlib.contextmanager
def serving_smollm2(*flags: str, programs: Path) -> Iterator[Server]:
    """The default model, started without naming it, by the kernels that users have."""
    smollm2_file()
    with contextlib.ExitStack() as stack:
        with _first_start_alone(programs):
            server = stack.enter_context(serving(*FLAGS, *flags, programs=programs, cpu_kernels="auto"))
        yield server


@contextlib.contextmanager
def _first_start_alone(programs: Path) -> Iterator[None]:
    """Let the first server of a run compile, on all processors; those of other workers would compile the same meanwhile."""
    programs.mkdir(parents=True, exist_ok=True)
    started = programs / "smollm2.started"
    with (programs / "smollm2.lock").open("w") as lock:
        if not started.exists():
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        started.touch()


@contextlib.contextmanager
def serving_tiny(*flags: str, programs: Path) -> Iterator[Server]:
    """The tiny model under the name `tiny`, whose outputs are known."""
    with serving(str(model().path), "--served-model-name", "tiny", *flags, programs=programs) as server:
        yield server


def process_usage(pid: int) -> Usage:
    """Read from /proc."""
    process = Path(f"/proc/{pid}")
    # The name in parentheses may hold spaces; the fields after it are numbers. See proc_pid_stat(5).
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    statuses = "".join(task.read_text() for task in process.glob("task/*/status"))
    resident_pages = int((process / "statm").read_text().split()[1])
    return Usage(
        resident_bytes=resident_pages * 4096,
        num_descriptors=len(list((process / "fd").iterdir())),
        num_threads=int(fields[17]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        num_switches=sum(map(int, re.findall(r"ctxt_switches:\s+(\d+)", statuses))),
    )
