"""`jaxserve chat` and `jaxserve complete` as processes, at a terminal and in pipes."""

from __future__ import annotations

import os
import pty
import re
import readline
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from jaxserve.tokenizer.tokenizer import load_tokenizer
from tests.e2e.http_server import ROOT, SOURCES, TOKENIZER, Server, running
from tests.e2e.real_server import FEW_PROGRAMS, model

pytestmark = pytest.mark.slow

JAXSERVE = [sys.executable, "-m", "jaxserve.cli.main"]
EOS, START = 2, 1
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{{ m.content }}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Thinks aloud and answers the same to everything."""
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    reply = load_tokenizer(TOKENIZER).encode("assistant\n<think>\nHm.\n</think>\n\nShe sells – 海", False)
    fake = {"vocab_size": 389, "num_blocks": 2048, "script": {"cue": START, "token_ids": [*reply, EOS]}}
    chat_model = {"model": str(TOKENIZER), "served_model_name": "tiny", "chat_template": str(template)}
    with running(fake, model=chat_model, server={"reasoning_parser": "qwen3", "api_key": "sk-1"}) as started:
        started.api_key = "sk-1"
        yield started


@pytest.fixture(scope="module")
def endless() -> Iterator[Server]:
    """Writes for a minute."""
    with running({"vocab_size": 389, "num_blocks": 2048, "device_seconds": 0.03, "eos_token_ids": ()}) as started:
        yield started


def environment(server: Server | None = None) -> dict[str, str]:
    """Return the environment of a shell for this server."""
    variables = {"JAXSERVE_PORT": str(server.port), "JAXSERVE_API_KEY": server.api_key or ""} if server else {}
    return os.environ | {"PYTHONPATH": SOURCES, "JAX_PLATFORMS": "cpu", "TERM": "xterm"} | variables


def run(*words: str, server: Server | None = None, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*JAXSERVE, *words],
        input=stdin,
        env=environment(server),
        cwd=ROOT,
        capture_output=True,
        timeout=120,
        check=False,
    )


class Terminal:
    """A program at a terminal: what it shows so far, and keys for it."""

    def __init__(self, *words: str, server: Server) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [*JAXSERVE, *words], stdin=theirs, stdout=theirs, stderr=theirs, env=environment(server), cwd=ROOT
        )
        os.close(theirs)
        self._shown = b""

    def wait_for(self, text: str) -> str:
        """Read until `text` is shown; returns all that is new up to its end."""
        while text.encode() not in self._shown:
            ready, _, _ = select.select([self._ours], [], [], TIMEOUT_S)
            assert ready, f"no {text!r} in {self._shown!r}"
            self._shown += os.read(self._ours, 4096)
        new, found, self._shown = self._shown.partition(text.encode())
        return (new + found).decode(errors="replace").replace("\r", "")

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode(errors="surrogateescape"))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal(request: pytest.FixtureRequest) -> Iterator[Any]:
    opened: list[Terminal] = []

    def start(*words: str, server: Server) -> Terminal:
        opened.append(Terminal(*words, server=server))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def test_a_chat_at_a_terminal(server: Server, terminal: Any) -> None:
    screen = terminal("chat", "--verbose", server=server)
    assert "tiny at http://127.0.0.1" in screen.wait_for("> ")
    for attempt in range(2):
        screen.type("hi\n")
        shown = screen.wait_for("> ")
        assert f"{DIM}Hm.{PLAIN}" in shown.replace("\n\x1b", "\x1b"), attempt
        assert "She sells – 海\n" in shown
        assert re.search(r"\[prompt \d+ tokens.*, reply \d+ tokens in .* s\), ended by stop\]", shown)
    screen.type("/undo\n")
    assert "forgotten: hi" in screen.wait_for("> ")
    screen.type("\x04")
    assert screen.process.wait(TIMEOUT_S) == 0


@pytest.mark.skipif("libedit" in (readline.__doc__ or ""), reason="libedit knows no bracketed paste")
def test_a_paste_of_several_lines_is_one_message_whatever_its_bytes(server: Server, terminal: Any) -> None:
    screen = terminal("chat", server=server)
    screen.wait_for("> ")
    screen.type("\x1b[200~one\ncaf\udce9\x1b[201~\n")
    screen.wait_for("She sells")
    screen.wait_for("> ")
    screen.type("/undo\n")
    assert "forgotten: one\ncaf\ufffd" in screen.wait_for("> ")


def test_ctrl_c_ends_the_reply_and_its_request_but_not_the_chat(endless: Server, terminal: Any) -> None:
    screen = terminal("chat", server=endless)
    screen.wait_for("> ")
    screen.type("hi\n")
    endless.await_metric("num_requests_running", 1)
    screen.process.send_signal(signal.SIGINT)
    screen.wait_for("[stopped]")
    endless.await_metric("num_requests_running", 0)
    screen.wait_for("> ")
    screen.process.send_signal(signal.SIGINT)
    screen.wait_for("Ctrl-D ends")
    screen.type("/exit\n")
    assert screen.process.wait(TIMEOUT_S) == 0


def test_a_piped_question_gets_the_answer_alone(server: Server) -> None:
    done = run("chat", "--system", "Be brief.", "--verbose", server=server, stdin=b"hi\n")
    assert (done.returncode, done.stdout.decode()) == (0, "She sells – 海\n")
    assert re.fullmatch(rb"\[prompt \d+ tokens.*ended by stop\]\n", done.stderr)


@pytest.mark.parametrize("words", [("x – y",), ("-",), ()])
def test_complete_writes_what_the_api_gives(endless: Server, words: tuple[str, ...]) -> None:
    with openai.OpenAI(base_url=f"{endless.url}/v1", api_key="none") as client:
        expected = (
            client.completions.create(model="tiny", prompt="x – y", max_tokens=12, seed=5, stop="QQ").choices[0].text
        )
    flags = ("--max-tokens", "12", "--seed", "5", "--stop", "QQ", "--url", f"{endless.url}/v1")
    done = run("complete", *words, *flags, stdin="x – y".encode())
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode() == re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "", expected).rstrip("\n") + "\n"


@pytest.mark.parametrize(
    ("words", "exit_code", "message"),
    [
        (("chat", "--url", "http://127.0.0.1:1"), 1, "no server at http://127.0.0.1:1: Connection refused; start one"),
        (("chat", "--temperature", "9"), 1, "400 Invalid value for 'temperature'"),
        (("chat", "--model", "nope"), 1, "404 The model `nope` does not exist"),
        (("chat", "--api-key", "sk-wrong"), 1, "401"),
        (("chat", "a.gguf", "--url", "http://127.0.0.1:1"), 2, "give one of them"),
        (("chat", "--", "--max-model-len", "64"), 2, "name a model"),
        (("complete", "x", "--max-tokens", "few"), 2, "--max-tokens"),
        (("complete", "x", "no-such-model"), 2, "no-such-model"),
    ],
)
def test_mistakes_are_one_line(server: Server, words: tuple[str, ...], exit_code: int, message: str) -> None:
    done = run(*words, server=server, stdin=b"hi")
    assert (done.returncode, done.stdout) == (exit_code, b""), done.stderr
    assert message in done.stderr.decode().splitlines()[-1]
    assert b"Traceback" not in done.stderr


def test_a_reader_that_leaves_is_no_accident(endless: Server) -> None:
    command = [*JAXSERVE, "complete", "x", "--max-tokens", "900"]
    process = subprocess.Popen(
        command, env=environment(endless), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(TIMEOUT_S) == 1
    assert process.stderr is not None
    with process.stderr as complaints:
        assert complaints.read() == b""


OWN_FLAGS = (*FEW_PROGRAMS, "--cpu-kernels", "xla")


def start_with_own_server(programs: Path, sockets: Path) -> subprocess.Popen[bytes]:
    words = ["complete", "-", str(model().path), "--max-tokens", "5", "--seed", "1", "--verbose"]
    words += ["--", *OWN_FLAGS, "--compile-cache", str(programs), "--uds-dir", str(sockets)]
    pipe = subprocess.PIPE
    process = subprocess.Popen([*JAXSERVE, *words], env=environment(), cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe)
    assert process.stdin is not None
    with process.stdin as text:
        text.write(b"She sells")
    process.stdin = None
    return process


def test_a_server_of_its_own_answers(programs: Path, tmp_path: Path) -> None:
    with start_with_own_server(programs, tmp_path) as process:
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert output.strip()
    assert b"reply 5 tokens" in errors
    assert list(tmp_path.iterdir()) == [], "the server went as it should"


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_server_of_its_own_does_not_outlive_it(
    programs: Path, tmp_path: Path, number: signal.Signals, exit_code: int
) -> None:
    with start_with_own_server(programs, tmp_path) as process:
        assert process.stderr is not None
        process.stderr.readline()  # the server says what it does
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(number)
        process.communicate(timeout=TIMEOUT_S)  # until the server has closed its stderr, too
    assert process.returncode == exit_code
    assert len(children) == 1
    assert not Path(f"/proc/{children[0]}/exe").exists()
