"""Virtual environments of peers and the commands that fill them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.peers.peer import PeerUnavailableError

COMMAND_TIMEOUT_S = 3600.0
LOW_PRIORITY = 10


def peers_folder() -> Path:
    """Return the default folder of peers, outside the source tree: they are large, and stay when the tree goes."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxserve-peers"


def run_step(command: Sequence[str], log: Path, *, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
    """Run `command` at low priority, its output appended to `log`. Raises PeerUnavailableError with its last error."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        output.write(f"$ {' '.join(command)}\n".encode())
    try:
        code = run_alone(["nice", "-n", str(LOW_PRIORITY), *command], log, timeout_s)
    except OSError as error:
        raise PeerUnavailableError(f"{command[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise PeerUnavailableError(f"{command[0]} took longer than {timeout_s:g} s; see {log}") from None
    if code != 0:
        raise PeerUnavailableError(f"{last_error(log.read_text(errors='replace'))} (exit code {code}, see {log})")


def run_alone(command: Sequence[str], log: Path, timeout_s: float) -> int:
    """The exit code of `command`, its output appended to `log`; none of its processes is left, whatever happens.

    Raises OSError, or subprocess.TimeoutExpired.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        return process.wait(timeout_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def last_error(log: str) -> str:
    """The line of a log that says most about a failure: the last one with "error" in it, or the last one."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["no output"])[-1][:300]


class VirtualEnvironment:
    """Python packages of one peer, apart from ours and from the other peers'."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder.parent / "install.log"

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def program(self, name: str) -> Path:
        return self.folder / "bin" / name

    @property
    def site_packages(self) -> Path:
        return self.folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"

    def install(self, *requirements: str, fallback_index: str | None = None) -> None:
        """Make the environment and put `requirements` in it, with pip as the user configured it.

        fallback_index: asked as well if that fails. Without requirements the environment has pip only.
        """
        if not self.python.exists():
            run_step([sys.executable, "-m", "venv", str(self.folder)], self.log)
        if not requirements:  # pip refuses to install nothing
            return
        words = ["install", "--disable-pip-version-check"]
        try:
            self.pip(*words, *requirements)
        except PeerUnavailableError:
            if fallback_index is None:
                raise
            self.pip(*words, "--extra-index-url", fallback_index, *requirements)

    def pip(self, *words: str) -> None:
        run_step([str(self.python), "-m", "pip", *words], self.log)

    def versions(self, *packages: str) -> dict[str, str]:
        """Return the versions of the installed packages."""
        found = importlib.metadata.distributions(path=[str(self.site_packages)])
        by_name = {each.metadata["Name"].lower(): each.version for each in found}
        python = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
        return {name: by_name[name] for name in packages if name in by_name} | {"python": python}


def install_once(stamp: Path, versions: Mapping[str, str], install: Callable[[], None]) -> None:
    """Call `install` unless `stamp` says that it ran to its end with the same `versions`."""
    wanted = json.dumps(dict(versions), sort_keys=True)
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return
    stamp.unlink(missing_ok=True)
    install()
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.write_text(wanted, encoding="utf-8")
