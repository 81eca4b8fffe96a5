"""The `jaxserve` command: one line per mistake, nothing imported that is not needed."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from jaxserve import __version__
from jaxserve.cli.internal.reference import pages
from jaxserve.cli.main import COMMANDS, main
from jaxserve.foreign_settings import ADVICE, advice_for_flag
from jaxserve.runtime.settings import BY_NAME, SETTINGS, closest

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "jaxserve.cli.main"]


@pytest.fixture
def health_server() -> Iterator[str]:
    """Answers 200 on /health and 503 on everything else."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 503)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_help_lists_every_command_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert [command.name for command in COMMANDS if f"  {command.name} " not in text] == []
    assert "examples:" in text


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("usage: jaxserve " + command)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["srve"], "unknown command `srve`; did you mean `serve`?"),
        (["serve", "--max-num-seq", "3"], "unknown option `--max-num-seq`; did you mean `--max-num-seqs`?"),
        (["serve", "--ctx-size=4096"], "unknown option `--ctx-size=4096`; use `--max-model-len`"),
        (["serve", "-c", "4096"], "unknown option `-c`; use `--max-model-len`"),
        (["plan", "-tp", "2"], "unknown option `-tp`; use `--tensor-parallel-size`"),
        (["serve", "--enforce-eager"], "unknown option `--enforce-eager`; not needed: no request waits for a compiler"),
        (["serve", "--nope-size", "3"], "unknown option `--nope-size`; `jaxserve serve --help` lists the options"),
        (["status", "--parallel", "3"], "unknown option `--parallel`; `jaxserve status --help` lists the options"),
        (["serve", "a", "b"], "unexpected argument `b`; `jaxserve serve --help` lists the options"),
        (["serve", "m", "--port", "x"], "--port 'x': expected an integer, at least 0 and at most 65535"),
        (["serve", "--port"], "argument --port: expected one argument"),
        (["serve", "--config", ""], "--config '': expected the path of a YAML file"),
        (["health", "--timeout", "0"], "argument --timeout: '0' is not a positive number of seconds"),
        (["status", "--timeout", "1e300"], "argument --timeout: '1e300' is not a positive number of seconds"),
        (["convert", "m", "~nosuchuser/m"], "OUT ~nosuchuser/m: its `~` stands for no home directory"),
        (["convert", "m"], "OUT is missing: the folder to write"),
        (
            ["bench", "startup", "--changed-flags", "'--port 1"],
            '--changed-flags "\'--port 1": no closing quotation',
        ),
        (
            ["bench"],
            "choose what to measure: `jaxserve bench serve`, `jaxserve bench offline`, `jaxserve bench startup`",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"jaxserve: error: {message}\n"


def test_advice_for_settings_of_other_servers_names_settings_of_this_one() -> None:
    named = {flag for text in ADVICE.values() for flag in re.findall(r"`(--[a-z-]+)", text)}
    own = {setting.flag for setting in SETTINGS} | {f"--no-{s.flag[2:]}" for s in SETTINGS if s.kind == "switch"}
    assert named - own == set()
    assert ADVICE.keys() & BY_NAME.keys() == set()
    assert closest("ctx_size", BY_NAME) == "; use `max_model_len`"


def test_every_flag_of_the_page_about_vllm_that_is_unknown_here_has_advice() -> None:
    page = (ROOT / "docs" / "differences.md").read_text("utf-8").partition("## The flags of `vllm serve`")[2]
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `--")]
    flags = {flag for row in rows for flag in re.findall(r"`(--[a-z-]+)", row)}
    own = {setting.flag for setting in SETTINGS}
    assert len(flags) > 20
    assert [flag for flag in sorted(flags - own) if advice_for_flag(flag) is None] == []


def test_version_names_jaxserve_jax_and_python(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"jaxserve {__version__} (jax ")


@pytest.mark.parametrize("command", ["version", "completion zsh", "health --help"])
def test_output_that_is_read_only_in_part_ends_the_command_without_a_traceback(command: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    words = [*COMMAND, *command.split()]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_names_that_are_not_utf_8_are_printed_escaped() -> None:
    done = subprocess.run([*COMMAND, "config", b"\xff.gguf", "--changed"], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"model:\n  model: \\udcff.gguf\n"), done.stderr


def test_a_command_runs_with_closed_streams() -> None:
    words = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *COMMAND, "version"]
    assert subprocess.run(words, check=False).returncode == 0


def test_help_of_a_command_is_what_its_own_flag_prints(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["help", "health"])
    assert capsys.readouterr().out.startswith("usage: jaxserve health")


def test_help_imports_neither_jax_nor_the_config() -> None:
    script = (
        "import sys; from jaxserve.cli.main import main; main(['--help']); "
        "sys.exit(bool({'jax', 'aiohttp', 'yaml', 'numpy', 'jaxserve.config'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_health_exits_by_the_answer(health_server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", "--url", health_server]) == 0
    assert main(["health", "--url", health_server + "/", "--ready"]) == 1
    assert "answered 503" in capsys.readouterr().err
    assert main(["health", "--url", health_server, "--live"]) == 1
    assert f"{health_server}/live: answered 503" in capsys.readouterr().err
    assert main(["health", "--url", "http://127.0.0.1:1"]) == 1
    assert "no answer: Connection refused\n" in capsys.readouterr().err


def test_health_finds_the_server_by_the_environment(health_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXSERVE_PORT", health_server.rpartition(":")[2])
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert main(["health"]) == 0


@pytest.mark.parametrize("command", ["health", "status"])
def test_a_certificate_of_the_environment_that_cannot_be_read_is_one_line(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAXSERVE_SSL_CERTFILE", "/nowhere/chain.pem")
    assert main([command]) == 2
    assert capsys.readouterr().err == (
        "jaxserve: error: JAXSERVE_SSL_CERTFILE /nowhere/chain.pem: cannot be read: No such file or directory\n"
    )


def test_a_server_over_several_hosts_is_not_replaced_in_place(capsys: pytest.CaptureFixture[str]) -> None:
    hosts = ["--num-hosts", "2", "--host-rank", "0", "--coordinator", "127.0.0.1:1", "--tensor-parallel-size", "2"]
    assert main(["upgrade", "model.gguf", "--port", "8123", *hosts]) == 2
    assert capsys.readouterr().err.startswith("jaxserve: error: --num-hosts 2: `jaxserve upgrade`")


def test_reference_pages_are_fresh() -> None:
    folder = ROOT / "docs/reference"
    for name, text in pages(folder).items():
        assert (folder / name).read_text(encoding="utf-8") == text, "run `make docs`"


@pytest.mark.parametrize(
    ("command", "piped", "message"),
    [
        ("chat", b"", "no question: standard input is empty, and no terminal"),
        ("chat", b" \n", "no question: standard input is empty, and no terminal"),
        ("complete", b"", "no text to continue: it is empty"),
    ],
)
def test_nothing_is_asked_of_a_server_if_nothing_is_piped_in(
    command: str, piped: bytes, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(piped)))
    assert main([command, "--url", "http://127.0.0.1:1"]) == 2
    assert capsys.readouterr().err == f"jaxserve: error: {message}\n"
