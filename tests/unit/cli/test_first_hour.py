"""The commands of the first hour: config, check, status and doctor."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from jaxserve.cli.main import main
from jaxserve.cli.status import status_lines
from jaxserve.errors import ConfigError
from jaxserve.runtime.environment import load_config
from jaxserve.runtime.settings import describe_changes
from jaxserve.tools import doctor
from jaxserve.tools.config_check import file_mistakes

ROOT = Path(__file__).parents[3]


def test_config_prints_what_would_be_in_force(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "m", "--api-key", "secret", "--kv-cache-memory", "1GiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "model:" in lines
    assert {"  model: m", "  api_key: ***", "  kv_cache_memory: 1GiB", "  port: 8000"} <= set(lines)
    assert main(["config", "m", "--changed"]) == 0
    assert "port" not in capsys.readouterr().out


def test_the_line_of_a_start_has_only_what_was_changed() -> None:
    config = load_config(flags={"model": "m", "max_num_seqs": "3", "api_key": "secret"})
    assert describe_changes(config) == "model=m max_num_seqs=3 api_key=***"


@pytest.mark.parametrize(
    ("text", "mistakes"),
    [
        ("model: m\nscheduler:\n  max_num_seqs: 4\n", []),
        ("# nothing\n", []),
        (
            "model: m\nscheduler:\n  max_num_seq: 4\nport: high\n",
            [
                "3: max_num_seq: unknown key; did you mean `max_num_seqs`?",
                "4: port 'high': expected an integer, at least 0 and at most 65535",
            ],
        ),
        ("cache:\n  port: 1\n", ["2: port: unknown key; it belongs to `server`"]),
        ("port: 1\nserver:\n  port: 2\n", ["3: port: given twice, first in line 1"]),
        ("- a\n", ["1: expected `key: value` lines"]),
        ("a: [\n", ["2: not YAML"]),
        ("scheduler: 3\n", ["1: scheduler: a section's settings stand below it, indented"]),
    ],
)
def test_check_names_line_key_and_suggestion(tmp_path: Path, text: str, mistakes: list[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    found = file_mistakes(file)
    assert len(found) == len(mistakes), found
    assert all(one.startswith(f"{file}:{expected}") for one, expected in zip(found, mistakes, strict=True)), found


def test_the_shipped_config_files_are_fine(capsys: pytest.CaptureFixture[str]) -> None:
    for file in set((ROOT / "configs").glob("*.yaml")) - {ROOT / "configs" / "ray-serve.yaml"}:  # Ray's, not ours
        assert main(["check", str(file)]) == 0, capsys.readouterr().err
    assert main(["check", "/nowhere.yaml"]) == 2


NUMBERS = dict.fromkeys(
    "running waiting kv_cache_usage prefix_cache_queries prefix_cache_hits preemptions prompt_tokens generation_tokens "
    "padding_tokens engine_restarts".split(),
    0.0,
)
STATE: dict[str, Any] = {
    "uptime_seconds": 3725.0,
    "engine": None,
    "numbers": NUMBERS,
    "steps": {},
    "compilations": {},
    "times": {
        name: {"seconds": 0, "count": 0} for name in ("time_to_first_token", "inter_token_latency", "device_step")
    },
    "refused": [{"time": 0, "route": "POST /x", "status": 400, "param": "n"}],
}


def test_status_is_one_screen() -> None:
    lines = status_lines("http://h:1", {"m": STATE}, ["m"], None)
    assert lines[0].endswith("http://h:1, up 1:02:05")
    assert lines[-1] == "  400 POST /x n"
    assert len(lines) <= 24
    engine = {
        "max_num_seqs": 4,
        "num_kv_blocks": 1000,
        "num_devices": 1,
        "platform": "cpu",
        "kv_dtype": "f",
        "max_model_len": 9,
    }
    used = STATE | {"engine": engine, "numbers": NUMBERS | {"prefix_cache_queries": 4.0, "prefix_cache_hits": 1.0}}
    text = "\n".join(status_lines("u", {"m": used}, ["m"], "answered 503"))
    assert "25.0% of prompt tokens found" in text
    assert "not serving (/health answered 503)" in text
    several = status_lines("u", {"m": used, "n": STATE}, ["m", "alias", "n"], None)
    assert [line for line in several if line.startswith(("m", "n:"))] == ["models        m, alias, n", "m:", "n:"]
    assert sum(line.startswith("requests ") for line in several) == 2


def test_status_without_a_server_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert main(["status", "--url", f"http://127.0.0.1:{port}"]) == 1
    assert "jaxserve serve" in capsys.readouterr().err


def test_doctor_has_a_fix_for_everything_that_is_wrong(tmp_path: Path) -> None:
    folder = tmp_path / "programs"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = {"model": str(tmp_path), "port": str(taken.getsockname()[1]), "compile_cache": str(folder)}
        config = load_config(flags=flags)
        checks = (doctor._versions, doctor._processors, doctor._memory, doctor._model, doctor._cache, doctor._port)
        findings = {finding.subject: finding for finding in (check(config) for check in checks)}
    assert {name for name, finding in findings.items() if finding.verdict == "wrong"} == {
        "model",
        "compile cache",
        "port",
    }
    assert all(finding.fix for finding in findings.values() if finding.verdict != "ok")
    assert "chmod go-w" in findings["compile cache"].fix


def test_doctor_warns_of_a_port_that_is_open_to_all() -> None:
    config = load_config(flags={"model": "m", "host": "0.0.0.0", "port": "0"})
    assert doctor._port(config).verdict == "note"
    with_key = load_config(flags={"model": "m", "host": "0.0.0.0", "port": "0", "api_key": "k"})
    assert doctor._port(with_key).verdict == "ok"


def test_a_config_file_that_cannot_be_read_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"/nowhere: No such file"):
        file_mistakes(Path("/nowhere"))
