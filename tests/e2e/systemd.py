"""A systemd of a test's own, in namespaces: it runs units as they are written, and leaves the machine's own processes alone."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.e2e.http_server import children_of, until

PROGRAM: Final = shutil.which("systemd", path="/lib/systemd:/usr/lib/systemd")
_SPACES: Final = "unshare --mount --pid --fork --kill-child --mount-proc sh -ec".split()
_HIERARCHY: Final = """
mount -t tmpfs none /sys/fs/cgroup
mkdir /sys/fs/cgroup/systemd
mount -t cgroup -o none,name=systemd none /sys/fs/cgroup/systemd
"""
_ENTER: Final = (
    _HIERARCHY
    + """
mkdir /sys/fs/cgroup/systemd/"$GROUP"
echo $$ >/sys/fs/cgroup/systemd/"$GROUP"/cgroup.procs
exec unshare --cgroup sh -ec "$INSIDE"
"""
)
"""In a control group of its own, whose root the next namespace shows: no group outside of it can be reached."""
_INSIDE: Final = """
umount /sys/fs/cgroup/systemd
mount -t cgroup -o none,name=systemd none /sys/fs/cgroup/systemd
for place in etc opt; do mount -t overlay -o "lowerdir=$FOLDER/$place:/$place" none /$place; done
mount -t tmpfs none /run
mkdir -p /run/systemd/system
mkdir -m 700 /run/user
"$SYSTEMD" --user &
wait
"""
"""systemd would do more as the first process. It refuses to run where no /run/systemd/system says that one did."""
_LEAVE: Final = _HIERARCHY + 'find /sys/fs/cgroup/systemd/"$GROUP" -depth -type d -exec rmdir {} +'
_TARGETS: Final = ("default", "basic", "shutdown")


@dataclass(frozen=True, slots=True)
class Systemd:
    """A service manager; the service that it runs writes its output to `log`."""

    process: subprocess.Popen[bytes]
    """It waits for the end of the namespaces."""
    log: Path

    def control(self, *words: str) -> str:
        """Run systemctl and return what it prints."""
        (pid,) = children_of(self.process.pid)
        command = ["nsenter", f"--target={pid}", "--mount", "--pid", "--cgroup", "systemctl", "--user", *words]
        environment = os.environ | {"XDG_RUNTIME_DIR": "/run/user"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.stderr}\n{self.log.read_text() if self.log.exists() else ''}"
        return done.stdout

    def property_of(self, unit: str, name: str) -> str:
        """Return what systemd knows of a unit, such as its `MainPID`."""
        return self.control("show", "--value", f"--property={name}", unit).strip()


@contextlib.contextmanager
def running_systemd(
    unit: str, text: str, files: Mapping[str, str], variables: Mapping[str, str]
) -> Iterator[Systemd | None]:
    """A systemd that has a unit; None on a machine where none can be run.

    files: what its processes find in /etc and /opt beside the machine's own, by path. variables: of the environment of services.
    """
    with tempfile.TemporaryDirectory(prefix="jaxserve-systemd-") as name:
        folder = Path(name)
        log, group = folder / "log", f"jaxserve-test-{os.getpid()}"
        units = {f"units/{target}.target": f"[Unit]\nDescription={target}\n" for target in _TARGETS}
        units |= {f"units/{unit}.service": text}
        units |= {f"units/{unit}.service.d/log.conf": f"[Service]\nStandardOutput=append:{log}\nStandardError=append:{log}\n"}  # fmt: skip
        for path, content in {**files, **units}.items():
            file = folder / path.removeprefix("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
            file.chmod(0o755 if content.startswith("#!") else 0o644)
        own = {
            "FOLDER": name,
            "GROUP": group,
            "INSIDE": _INSIDE,
            "SYSTEMD": PROGRAM or "",
            "XDG_RUNTIME_DIR": "/run/user",
            "XDG_CONFIG_HOME": "/run/user/config",  # units are enabled there
        }
        environment = {**os.environ, **variables, **own, "SYSTEMD_UNIT_PATH": f"{folder}/units", "SYSTEMD_LOG_TARGET": "console"}  # fmt: skip
        if PROGRAM is None or os.geteuid() != 0:
            yield None
            return
        with (folder / "systemd.log").open("wb") as output:
            process = subprocess.Popen([*_SPACES, _ENTER], env=environment, stdout=output, stderr=output)
        try:
            until(lambda: process.poll() is not None or children_of(process.pid), "no process in the namespaces")
            pid = next(iter(children_of(process.pid)), None) if process.poll() is None else None
            socket = Path(f"/proc/{pid}/root/run/user/systemd/private")
            until(lambda: process.poll() is not None or socket.exists(), "systemd never listened")
            yield None if process.poll() is not None else Systemd(process, log)
        finally:
            for child in children_of(process.pid) if process.poll() is None else ():
                os.kill(child, signal.SIGKILL)  # it takes all others with it, before unshare ends
            process.wait()
            subprocess.run([*_SPACES, _LEAVE], env=environment, check=False, capture_output=True)
