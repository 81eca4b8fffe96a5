"""The real docker asks an engine for the containers and images that the pages describe."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documented_commands import PAGES, ROOT, commands_of
from tests.unit.docker.docker_api import Engine, running_engine
from tests.unit.docker.test_docker_files import DOCKERFILE, run_tool, stages

pytestmark = pytest.mark.slow
SHOWN = [words for page in PAGES for words in commands_of(page, "docker")]


def shown(name: str) -> list[list[str]]:
    """Return the commands of the pages with this subcommand."""
    found = [words for words in SHOWN if words[1] == name]
    assert found
    return found


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    if shutil.which("docker") is None:
        pytest.skip("no docker on this machine")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/socket")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with running_engine(tmp_path / "socket") as engine:
        yield engine


def run(words: list[str]) -> None:
    done = subprocess.run(words, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_containers_get_devices_ports_volumes_and_time_to_end(engine: Engine) -> None:
    for words in shown("run"):
        run(words)
    made = {container["Image"].partition(":")[2]: container for container in engine.containers}
    assert set(made) == {"cpu", "cuda", "tpu"}
    for container in made.values():
        assert container["StopTimeout"] == 60
        assert "programs:/cache/programs" in container["HostConfig"]["Binds"]
    (devices,) = made["cuda"]["HostConfig"]["DeviceRequests"]
    assert (devices["Count"], devices["Capabilities"]) == (-1, [["gpu"]]), "all GPUs"
    assert made["cpu"]["HostConfig"]["PortBindings"]["8000/tcp"][0]["HostPort"] == "8000"
    tpu = made["tpu"]["HostConfig"]
    assert tpu["Privileged"] and tpu["NetworkMode"] == "host" and made["tpu"]["User"] == "0"
    assert tpu["Ulimits"] == [{"Name": "memlock", "Hard": -1, "Soft": -1}]


def test_the_context_of_a_build_has_what_the_dockerfile_copies_and_no_more(engine: Engine) -> None:
    """By docker's own reading of .dockerignore; its old builder, which sends the context as one archive."""
    for words in shown("build"):
        run(words)
    assert {parameters["target"][0] for parameters, _ in engine.builds} == {"cpu", "cuda", "tpu"} <= set(stages())
    copied = [source for line in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.M) for source in line.split()]
    copied += re.findall(r"--mount=type=bind,source=([^,]+),", DOCKERFILE)
    assert len(copied) > 8
    for _, files in engine.builds:
        assert [source for source in copied if source not in files and not any(file.startswith(f"{source}/") for file in files)] == []  # fmt: skip
        folders = {file.split("/")[0] for file in files}
        assert folders <= {source.split("/")[0] for source in copied} | {".dockerignore", "docker", "Dockerfile"}
        assert not [file for file in files if file.endswith((".so", ".pyc"))], "built elsewhere"


def test_images_for_a_cluster_are_pushed_under_the_name_that_they_are_built_with(engine: Engine) -> None:
    for words in shown("push"):
        run(words)
    assert engine.pushes and set(engine.pushes) <= {words[words.index("--tag") + 1] for words in shown("build")}


def test_compose_accepts_the_profiles_of_the_page() -> None:
    """`config` in place of `up`: what would be started."""
    for words in shown("compose"):
        assert words[-1] == "up"
        done = run_tool("docker-compose", *words[2:-1], "config", "--services")
        assert done.returncode == 0, done.stderr
        assert set(done.stdout.split()) == {"cpu", "prometheus", "alertmanager", "grafana"}
