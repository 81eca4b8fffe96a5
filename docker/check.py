"""Builds the cpu image and runs it as a cluster does, without a container engine: `make container-check`, as root.

Needs buildah, and mmdebstrap unless --pinned or --image is given (Debian: apt-get install buildah mmdebstrap).

1. Build the image: on the pinned base images (--pinned), or on a Debian root with its Python, for machines without a registry.
2. Assert its size.
3. Start it as its own user on a read-only root, without capabilities and without a network, with two volumes that only that
   user can write. It has to answer a completion and its health checks from inside, to write nowhere else, and to end with 0.
4. Change the volumes' permissions as kubelet does for `fsGroup: 0`, and start again: every program comes from the cache.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
MAX_BYTES: Final = 1_000_000_000
START_TIMEOUT_S: Final = 900
STARTED: Final = re.compile(r"(cold|warm|partly warm) start in ([\d.]+) s; (\d+) of (\d+) programs from the cache")
MOUNTS: Final = """
set -e
mount --bind "$1" "$1"
mount --bind "$2/hf" "$1/cache/hf"
mount --bind "$2/programs" "$1/cache/programs"
mount -t tmpfs -o mode=1777 tmpfs "$1/tmp"
mount -t proc proc "$1/proc"
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


@dataclass(frozen=True, slots=True)
class Image:
    """An image, mounted, and what its configuration says."""

    root: Path
    config: dict[str, Any]

    def command(self, *words: str) -> list[str]:
        """Return the command that runs `words` inside, as the image's user and without capabilities."""
        user, group = self.config["User"].split(":")
        privileges = f"--reuid {user} --regid {group} --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all"
        return ["/usr/bin/env", "-i", *self.config["Env"], "/usr/bin/setpriv", *privileges.split(), *words]


def main() -> int:
    """Run all checks. Returns the exit code."""
    options = parse()
    if os.geteuid() != 0:
        raise SystemExit("container-check: only root may mount and make namespaces")
    image = options.image or build(options)
    with tempfile.TemporaryDirectory(prefix="jaxserve-volumes-") as folder, mounted(image) as found:
        check_size(found, options.max_bytes)
        volumes = make_volumes(Path(folder), found)
        first = serve_once(found, volumes)
        report(f"first start: {first[0]}, {first[1]:.1f} s, {first[3]} programs")
        check(first[0] == "cold" and first[3] > 0, "the first start has no programs to find")
        change_permissions(volumes)
        second = serve_once(found, volumes)
        report(f"second start, after kubelet's change of permissions: {second[0]}, {second[1]:.1f} s")
        check(second[0] == "warm" and second[2] == first[3], f"not every program came from the cache: {second}")
    report("all checks passed")
    return 0


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="container-check", description="build and run the cpu image")
    parser.add_argument("--image", help="check this image of buildah's storage; do not build one")
    parser.add_argument("--pinned", action="store_true", help="build on the base images of the Dockerfile")
    parser.add_argument("--volume", action="append", default=[], help="HOST:IMAGE:ro of buildah, for pip's settings")
    parser.add_argument("--max-bytes", type=int, default=MAX_BYTES, help="size that the image may have")
    return parser.parse_args()


def build(options: argparse.Namespace) -> str:
    """Build the image; returns its name."""
    arguments = (
        [] if options.pinned else ["BASE_IMAGE=localhost/jaxserve-base", "COMPILER_IMAGE=localhost/jaxserve-compiler"]
    )
    if not options.pinned and not has_image("jaxserve-compiler"):
        build_bases()
    report("building the cpu image")
    words = [f"--volume={volume}" for volume in options.volume] + [f"--build-arg={word}" for word in arguments]
    command = ["buildah", "bud", "--layers", "--format=docker", *words, "--target=cpu", "--tag=jaxserve:cpu"]
    run(*command, f"--file={ROOT / 'docker' / 'Dockerfile'}", str(ROOT))
    return "jaxserve:cpu"


def has_image(name: str) -> bool:
    """Return whether buildah has an image of this name."""
    return (
        subprocess.run(["buildah", "inspect", "--type=image", name], capture_output=True, check=False).returncode == 0
    )


def build_bases() -> None:
    """Make the two base images from Debian's packages."""
    report("making base images of Debian packages")
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "root.tar"
        run(
            "mmdebstrap",
            "--variant=minbase",
            "--include=python3,python3-venv,ca-certificates",
            "bookworm",
            str(archive),
        )
        container = run("buildah", "from", "scratch")
        run("buildah", "add", "--quiet", container, str(archive), "/")
    # What Debian's slim images leave out.
    extras = "/usr/share/doc /usr/share/man /usr/share/locale /usr/share/info /var/lib/apt/lists/* /var/cache/apt/*"
    inside(container, f"ln -sf python3 /usr/bin/python; rm -rf {extras}")
    run("buildah", "commit", "--quiet", container, "jaxserve-base")
    inside(container, "apt-get update -qq && apt-get install -y -qq --no-install-recommends g++", network=True)
    run("buildah", "commit", "--quiet", container, "jaxserve-compiler")
    run("buildah", "rm", container)


def inside(container: str, script: str, *, network: bool = False) -> None:
    """Run a shell script in a container that is being built."""
    certificates = ["--volume=/etc/ssl/certs:/etc/ssl/certs:ro"] if network else []
    run("buildah", "run", *certificates, container, "--", "sh", "-c", script)


@contextlib.contextmanager
def mounted(image: str) -> Iterator[Image]:
    """Mount an image for as long as it is checked."""
    config = json.loads(run("buildah", "inspect", "--type=image", image))["Docker"]["config"]
    container = run("buildah", "from", "--pull-never", image)
    try:
        yield Image(Path(run("buildah", "mount", container)), config)
    finally:
        run("buildah", "rm", container)


def check_size(image: Image, max_bytes: int) -> None:
    """Assert the bytes of all files, uncompressed."""
    size = int(run("du", "--summarize", "--bytes", "--one-file-system", str(image.root)).split()[0])
    report(f"size: {size / 1e6:.0f} MB")
    check(size <= max_bytes, f"the image has {size} bytes, more than {max_bytes}")


def make_volumes(folder: Path, image: Image) -> Path:
    """Make the folders of two volumes, which belong to the image's user."""
    user, group = map(int, image.config["User"].split(":"))
    for name in ("hf", "programs"):
        (folder / name).mkdir()
        os.chown(folder / name, user, group)
    folder.chmod(0o755)
    return folder


def change_permissions(volumes: Path, group: int = 0) -> None:
    """Do to all files what kubelet does for `fsGroup`: the group gets them, may write them, and owns what comes."""
    for place, folders, files in os.walk(volumes):
        for path in [Path(place, name) for name in files if not Path(place, name).is_symlink()]:
            os.chown(path, -1, group)
            path.chmod(path.stat().st_mode & 0o7777 | 0o660)
        for path in [Path(place, name) for name in folders]:
            os.chown(path, -1, group)
            path.chmod(path.stat().st_mode & 0o7777 | 0o2770)


def serve_once(image: Image, volumes: Path) -> tuple[str, float, int, int]:
    """Start the image, ask it, and stop it; returns the kind of start, its seconds, programs from the cache and all."""
    words = [*image.config["Entrypoint"], *image.config["Cmd"]]
    spaces = ["unshare", "--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child"]
    command = [*spaces, "sh", "-c", MOUNTS, "sh", str(image.root), str(volumes), *image.command(*words)]
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=open(log.name, "wb"), stderr=subprocess.STDOUT)  # noqa: SIM115
        try:
            started = await_start(process, Path(log.name))
            pid = first_process(process.pid)
            check("Paris" in enter(image, pid, "python", "-c", QUESTION), "the model does not know where Paris is")
            enter(image, pid, *image.config["Healthcheck"]["Test"][1:])
            enter(image, pid, "jaxserve", "health")
            identity = enter(image, pid, "id", "-u").strip()
            check(identity == image.config["User"].split(":")[0], f"it runs as {identity}")
            read_only = (
                "for f in /home/jaxserve /opt/venv /etc /; do ! touch $f/x 2>/dev/null || exit 1; done; touch /tmp/x"
            )
            enter(image, pid, "sh", "-c", read_only)
            os.kill(pid, signal.SIGTERM)
            check(process.wait(90) == 0, "it did not end with 0 after SIGTERM")
        except BaseException:
            print(Path(log.name).read_text("utf-8"), file=sys.stderr)
            raise
        finally:
            process.kill()
            process.wait()
    return started


def await_start(process: subprocess.Popen[bytes], log: Path) -> tuple[str, float, int, int]:
    """Wait for the line that says how the start went."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        text = log.read_text("utf-8")
        if "jaxserve is ready" in text and (found := STARTED.search(text)):
            return found[1], float(found[2]), int(found[3]), int(found[4])
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


def run(*command: str) -> str:
    """Return what a program prints. Raises SystemExit with its errors if it fails."""
    done = subprocess.run(
        command, env=os.environ | {"BUILDAH_ISOLATION": "chroot"}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(
            f"container-check: {shlex.join(command)[:300]} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    return done.stdout.strip()


def check(holds: bool, complaint: str) -> None:
    """Raise SystemExit with `complaint` unless `holds`."""
    if not holds:
        raise SystemExit(f"container-check: {complaint}")


def report(text: str) -> None:
    """Say what was found."""
    print(f"== {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
