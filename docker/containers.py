"""Runs an image as a cluster does, without a container engine: namespaces, a read-only root, no capabilities, no network."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from buildah import check, run

START_TIMEOUT_S: Final = 900
STARTED: Final = re.compile(r"(cold|warm|partly warm) start in ([\d.]+) s; (\d+) of (\d+) programs from the cache")
SPACES: Final = "unshare --mount --net --pid --ipc --uts --fork --kill-child".split()
MOUNTS: Final = """
set -e
mount --bind "$1" "$1"
mount --bind "$2/hf" "$1/cache/hf"
mount --bind "$2/programs" "$1/cache/programs"
mount -t tmpfs -o mode=1777 tmpfs "$1/tmp"
mount -t proc proc "$1/proc"
mount -t sysfs -o ro sysfs "$1/sys"
mount -t tmpfs -o mode=755 tmpfs "$1/dev"
for name in null zero random urandom; do touch "$1/dev/$name"; mount --bind "/dev/$name" "$1/dev/$name"; done
mkdir "$1/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$1/dev/shm"
mount -o remount,ro,bind "$1"
ip link set lo up
root=$1
shift 2
exec chroot "$root" "$@"
"""
"""Mounts of a container; arguments: its root, the folder of its volumes, and what it runs."""
QUESTION: Final = """
import json, urllib.request
body = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
headers = {"Content-Type": "application/json"}
request = urllib.request.Request("http://127.0.0.1:8000/v1/completions", json.dumps(body).encode(), headers)
print(json.load(urllib.request.urlopen(request))["choices"][0]["text"])
"""
LATE_PROGRAMS: Final = """
import re, time, urllib.request
while float(re.search(r"late_programs\\{.*\\} (.*)", urllib.request.urlopen("http://127.0.0.1:8000/metrics").read().decode())[1]):
    time.sleep(0.2)
"""
"""Waits until the programs that follow beside requests are made: the next start is to find them."""
READ_ONLY: Final = "for f in /home/jaxserve /opt/venv /etc /; do ! touch $f/x 2>/dev/null || exit 1; done; touch /tmp/x"


@dataclass(frozen=True, slots=True)
class Image:
    """An image, mounted, what its configuration says, the folder of its volumes, and variables that are set beside its own."""

    root: Path
    config: Mapping[str, Any]
    volumes: Path
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def user(self) -> tuple[int, int]:
        """The user and the group that the image runs as."""
        user, group = map(int, self.config["User"].split(":"))
        return user, group

    def command(self, *words: str) -> list[str]:
        """Return the command that runs `words` inside, as the image's user and without capabilities."""
        user, group = self.user
        privileges = f"--reuid {user} --regid {group} --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all"
        variables = [*self.config["Env"], *(f"{name}={value}" for name, value in self.variables.items())]
        return ["/usr/bin/env", "-i", *variables, "/usr/bin/setpriv", *privileges.split(), *words]

    def container(self, *words: str) -> list[str]:
        """Return the command that runs `words` in a new container."""
        return [*SPACES, "sh", "-c", MOUNTS, "sh", str(self.root), str(self.volumes), *self.command(*words)]

    @property
    def start(self) -> list[str]:
        """The command that a container of this image runs."""
        return [*self.config["Entrypoint"], *self.config["Cmd"]]


@dataclass(frozen=True, slots=True)
class Start:
    """A server's start, as its log tells it."""

    kind: str
    seconds: float
    cached_programs: int
    programs: int


@contextlib.contextmanager
def mounted(name: str) -> Iterator[Image]:
    """Mount an image, and make empty volumes that belong to its user, for as long as it is checked."""
    config = json.loads(run("buildah", "inspect", "--type=image", name))["Docker"]["config"]
    container = run("buildah", "from", "--pull-never", name)
    with tempfile.TemporaryDirectory(prefix="jaxserve-volumes-") as folder:
        try:
            image = Image(Path(run("buildah", "mount", container)), config, Path(folder))
            image.volumes.chmod(0o755)
            for volume in ("hf", "programs"):
                (image.volumes / volume).mkdir()
                os.chown(image.volumes / volume, *image.user)
            yield image
        finally:
            run("buildah", "rm", container)


def change_permissions(volumes: Path, group: int = 0) -> None:
    """Do to all files what kubelet does for `fsGroup`: the group gets them, may write them, and owns what comes."""
    for place, folders, files in os.walk(volumes):
        for path in [Path(place, name) for name in files if not Path(place, name).is_symlink()]:
            os.chown(path, -1, group)
            path.chmod(path.stat().st_mode & 0o7777 | 0o660)
        for path in [Path(place, name) for name in folders]:
            os.chown(path, -1, group)
            path.chmod(path.stat().st_mode & 0o7777 | 0o2770)


def run_once(image: Image, *words: str) -> tuple[int, str]:
    """Run a command in a container until it ends; returns its exit code and what it prints."""
    done = subprocess.run(
        image.container(*words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.returncode, done.stdout


def serve_once(image: Image) -> Start:
    """Start the server, ask it, and stop it. Raises SystemExit, after the server's log, if something is not as it should be."""
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as log:
        process = subprocess.Popen(image.container(*image.start), stdout=open(log.name, "wb"), stderr=subprocess.STDOUT)  # noqa: SIM115
        try:
            started = await_start(process, Path(log.name))
            pid = first_process(process.pid)
            check("Paris" in enter(image, pid, "python", "-c", QUESTION), "the model does not know where Paris is")
            enter(image, pid, *image.config["Healthcheck"]["Test"][1:])
            enter(image, pid, "jaxserve", "health")
            identity = enter(image, pid, "id", "-u").strip()
            check(identity == str(image.user[0]), f"it runs as {identity}")
            enter(image, pid, "sh", "-c", READ_ONLY)
            enter(image, pid, "python", "-c", LATE_PROGRAMS)
            os.kill(pid, signal.SIGTERM)
            check(process.wait(90) == 0, "it did not end with 0 after SIGTERM")
        except BaseException:
            print(Path(log.name).read_text("utf-8"), file=sys.stderr)
            raise
        finally:
            process.kill()
            process.wait()
    return started


def await_start(process: subprocess.Popen[bytes], log: Path) -> Start:
    """Wait for the line that says how the start went."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        text = log.read_text("utf-8")
        if "jaxserve is ready" in text and (found := STARTED.search(text)):
            return Start(found[1], float(found[2]), int(found[3]), int(found[4]))
        check(process.poll() is None, f"it ended with {process.returncode}")
        time.sleep(0.2)
    raise SystemExit(f"container-check: not ready after {START_TIMEOUT_S} s")


def first_process(parent: int) -> int:
    """Return the process that is the first one in its namespace."""
    (child,) = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return int(child)


def enter(image: Image, pid: int, *words: str) -> str:
    """Run a command beside the server; returns its output. Raises SystemExit if it fails."""
    spaces = ["nsenter", f"--target={pid}", "--mount", "--net", "--pid", "--ipc", "--uts", "--root", "--wd"]
    return run(*spaces, *image.command(*words))
