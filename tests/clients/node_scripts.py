"""Runs the scripts of `node/` where node and npm are found."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.lane import API_KEY
from tests.e2e.http_server import Server

FOLDER = Path(__file__).parent / "node"
NODE = shutil.which("node")


def requires(package: str) -> list[pytest.MarkDecorator]:
    """Return marks that skip tests without node or without one of its packages."""
    return [
        pytest.mark.skipif(NODE is None, reason="no node on this machine"),
        pytest.mark.skipif(not (FOLDER / "node_modules" / package).is_dir(), reason=f"no npm has installed {package}"),
    ]


def output_of(words: list[str], server: Server, model: str, script: str | None = None) -> str:
    """Return what node prints. script: the text of a module, read from standard input."""
    environment = os.environ | {"SERVER_URL": server.url, "API_KEY": API_KEY, "MODEL": model}
    command = [str(NODE), *words]
    done = subprocess.run(
        command, input=script, cwd=FOLDER, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(*words: str, server: Server, model: str) -> Any:
    """Return the output of a script, one line of JSON."""
    return json.loads(output_of(list(words), server, model))
