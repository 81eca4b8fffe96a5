"""Runs buildah and other programs for `container-check`, and reports what was found."""

from __future__ import annotations

import os
import shlex
import subprocess


def run(*command: str) -> str:
    """Return what a program prints. Raises SystemExit with its errors if it fails."""
    environment = os.environ | {"BUILDAH_ISOLATION": "chroot"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(
            f"container-check: {shlex.join(command)[:300]} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    return done.stdout.strip()


def inside(container: str, script: str, *, network: bool = False) -> None:
    """Run a shell script in a container that is being built."""
    certificates = ["--volume=/etc/ssl/certs:/etc/ssl/certs:ro"] if network else []
    run("buildah", "run", *certificates, container, "--", "sh", "-c", script)


def check(holds: bool, complaint: str) -> None:
    """Raise SystemExit with `complaint` unless `holds`."""
    if not holds:
        raise SystemExit(f"container-check: {complaint}")


def report(text: str) -> None:
    """Say what was found."""
    print(f"== {text}", flush=True)
