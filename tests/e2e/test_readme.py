"""Every command and snippet of the README, run against the default model that it speaks of."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.http_server import ROOT, SOURCES, Server
from tests.e2e.real_server import FEW_PROGRAMS, model, serving_smollm2
from tests.smollm2 import LIMITS
from tests.unit.checkpoint.checkpoint_files import smollm2_file

pytestmark = pytest.mark.slow

BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
CURL, *COMMANDS = sorted(
    (block for language, block in BLOCKS if language == "console"), key=lambda text: not text.startswith("curl")
)
LINES = [line for block in COMMANDS for line in block.splitlines()]
JAXSERVE = [sys.executable, "-m", "jaxserve.cli.main"]


def blocks(language: str) -> list[str]:
    return [block for found, block in BLOCKS if found == language]


def lines(start: str) -> list[str]:
    return [line for line in LINES if line.startswith(start)]


@pytest.fixture(scope="module")
def server(programs: Path) -> Iterator[Server]:
    with serving_smollm2(programs=programs) as running:
        yield running


def run(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """In an empty folder, with the sources at hand."""
    environment = os.environ | {"PYTHONPATH": SOURCES, "JAX_PLATFORMS": "cpu"} | variables
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)


def test_every_block_has_its_test() -> None:
    assert {language for language, _ in BLOCKS} == {"mermaid", "console", "json", "python"}
    assert (len(blocks("python")), len(blocks("json"))) == (2, 1)
    starts = (
        "make serve",
        "jaxserve serve ",
        "jaxserve plan ",
        "jaxserve bench serve",
        "jaxserve bench offline",
        "jaxserve bench startup",
    )
    assert sorted(line for start in starts for line in lines(start)) == sorted(LINES)


@pytest.mark.parametrize("line", lines("jaxserve plan "))
def test_plan_as_shown_fits(line: str, tmp_path: Path) -> None:
    """Plan the default model, from its header: tests fetch no model of the hub."""
    words = shlex.split(line)[1:]
    words[1] = str(smollm2_file())
    done = run([*JAXSERVE, *words, "--no-compile"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].endswith(": fits")


@pytest.mark.optimized
@pytest.mark.versions
def test_curl_gets_the_reply_shown(server: Server, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    done = run(["sh", "-c", CURL.replace("http://127.0.0.1:8000", server.url)], tmp_path)
    assert done.returncode == 0, done.stderr
    [shown] = blocks("json")
    own = {"id": None, "created": None, "system_fingerprint": None}
    assert json.loads(done.stdout) | own == json.loads(shown) | own


@pytest.mark.optimized
@pytest.mark.versions
def test_python_prints_what_is_shown(server: Server, tmp_path: Path) -> None:
    [snippet, _] = blocks("python")
    done = run([sys.executable, "-c", snippet.replace("http://127.0.0.1:8000", server.url)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"# {done.stdout}" == snippet.splitlines()[-1]


@pytest.mark.optimized
def test_python_without_a_server_prints_what_is_shown(tmp_path: Path, programs: Path) -> None:
    smollm2_file()
    [_, snippet] = blocks("python")
    shape = LIMITS | {"compile_cache": str(programs)}
    words = ", ".join(f"{name}={value!r}" for name, value in shape.items())
    shaped, changes = re.subn(r"LLM\(max_model_len=\d+\)", f"LLM({words})", snippet)
    assert changes == 1
    done = run([sys.executable, "-c", shaped], tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"# {done.stdout}" == snippet.splitlines()[-1] + "\n"


@pytest.mark.optimized
def test_benchmark_measures_the_server(server: Server, tmp_path: Path) -> None:
    [line] = lines("jaxserve bench serve")
    fewer = ["--num-prompts", "3", "--output-len", "4", "--json", "figures.json"]
    done = run(JAXSERVE + shlex.split(line)[1:] + fewer, tmp_path, JAXSERVE_PORT=str(server.port))
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["completed"], figures["failed"], figures["total_output_tokens"]) == (3, 0, 12)
    assert figures["model_id"] in done.stdout


def test_benchmark_measures_the_engine_alone(tmp_path: Path, programs: Path) -> None:
    [line] = lines("jaxserve bench offline")
    smaller = [str(model().path), *FEW_PROGRAMS, "--num-prompts", "2", "--input-len", "48", "--output-len", "4"]
    smaller += ["--kv-cache-memory", "1MiB", "--compile-cache", str(programs), "--json", "figures.json"]
    done = run(JAXSERVE + shlex.split(line)[1:] + smaller, tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["completed"], figures["total_output_tokens"]) == (2, 8)
    assert figures["num_steps"] > 0


def test_benchmark_measures_starts(tmp_path: Path) -> None:
    [line] = lines("jaxserve bench startup")
    smaller = ["--num-warm", "1", "--json", "figures.json", "--", str(model().path), *FEW_PROGRAMS]
    done = run(JAXSERVE + shlex.split(line)[1:] + smaller, tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["cold_ready_s"] > figures["warm_ready_s"][0] > 0


@pytest.mark.parametrize("line", lines("make serve"))
def test_make_starts_the_server(line: str) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    words = shlex.split(line)
    # Not the settings of a `make test` that may run us.
    done = run(["make", "--no-print-directory", "--dry-run", *words[1:]], ROOT, MAKEFLAGS="", MAKELEVEL="")
    assert done.returncode == 0, done.stderr
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    expected = [settings.get("MODEL", ""), "--port", settings.get("PORT", "8000"), settings.get("ARGS", "")]
    program, *shown = done.stdout.splitlines()[-1].split()
    assert program.endswith("/bin/jaxserve")
    assert shown == ["serve", *" ".join(expected).split()]


@pytest.mark.parametrize("line", lines("jaxserve serve"))
def test_hub_model_is_looked_for_on_the_hub(line: str, tmp_path: Path) -> None:
    """Without a network and with an empty cache that is as far as it gets."""
    command = JAXSERVE + shlex.split(line)[1:]
    if "--config" in command:
        (tmp_path / "configs").symlink_to(ROOT / "configs")
    done = run([*command, "--port", "0"], tmp_path, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hub"))
    assert done.returncode == 2
    [error] = [text for text in done.stderr.splitlines() if text.startswith("jaxserve: error: ")]
    assert re.match(r"jaxserve: error: model Qwen/Qwen3-\S+: .*HF_HUB_OFFLINE", error)
