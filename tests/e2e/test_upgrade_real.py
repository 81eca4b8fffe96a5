"""`jaxserve upgrade --detach` as a service manager runs it: the default model, real processes, the official client."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.e2e.http_server import ROOT, SOURCES, Server, until
from tests.e2e.real_server import COLD_START_TIMEOUT_S, serving_smollm2
from tests.e2e.test_http_lifecycle import is_alive

pytestmark = [pytest.mark.slow, pytest.mark.optimized]


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The socket on which systemd would wait for the state of its service."""
    with (
        tempfile.TemporaryDirectory(prefix="jaxserve-test-") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener,
    ):
        path = f"{folder}/notify"
        listener.bind(path)
        listener.settimeout(COLD_START_TIMEOUT_S)
        monkeypatch.setenv("NOTIFY_SOCKET", path)
        yield listener


class Readers:
    """Threads that ask for the same greedy text again and again, streamed and whole; none of them retries."""

    def __init__(self, server: Server) -> None:
        self._client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        self._is_over = threading.Event()
        self.texts: list[str] = []
        self.failures: list[str] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._read, args=(is_streamed,)) for is_streamed in (True, False, True)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            for thread in threads:
                thread.join()

    def _read(self, is_streamed: bool) -> None:
        while not self._is_over.is_set():
            try:
                self.texts.append(self._streamed() if is_streamed else self._whole())
            except openai.OpenAIError as error:
                self.failures.append(repr(error))

    def _whole(self) -> str:
        reply = self._client.completions.create(
            model="SmolLM2-135M-Instruct", prompt="One, two,", max_tokens=24, temperature=0
        )
        return reply.choices[0].text

    def _streamed(self) -> str:
        chunks = self._client.completions.create(
            model="SmolLM2-135M-Instruct", prompt="One, two,", max_tokens=24, temperature=0, stream=True
        )
        return "".join(chunk.choices[0].text for chunk in chunks)


def upgrade(server: Server, log: Path) -> None:
    """Run `jaxserve upgrade --detach` with the options of `server`."""
    words = [str(word) for word in server.process.args]  # type: ignore[union-attr]
    words[words.index("serve")] = "upgrade"
    words[words.index("--port") + 1] = str(server.port)
    with log.open("ab") as output:
        subprocess.run(
            [*words, "--detach"],
            stdout=output,
            stderr=output,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": SOURCES, "JAX_PLATFORMS": "cpu"},
            timeout=COLD_START_TIMEOUT_S,
            check=True,
        )


def test_the_default_model_is_replaced_twice_and_no_call_of_the_client_fails(
    programs: Path, manager: socket.socket, tmp_path: Path
) -> None:
    log, pids = tmp_path / "log", []
    with serving_smollm2(programs=programs) as server:
        assert manager.recv(4096) == b"READY=1"
        readers = Readers(server)
        try:
            with readers.running():
                for _ in range(2):
                    upgrade(server, log)
                    state = re.fullmatch(rb"MAINPID=(\d+)\nREADY=1", manager.recv(4096))
                    assert state
                    pids.append(int(state[1]))
            assert readers.failures == []
            assert len(set(readers.texts)) == 1, "a reply was cut"
            assert server.process.wait(60) == 0, server.output
            until(lambda: not is_alive(pids[0]), "the second server never ended")
            assert log.read_text().count("warm start in") == 2, "programs were compiled again"
            os.kill(pids[1], signal.SIGTERM)
            assert manager.recv(4096) == b"STOPPING=1"
            until(lambda: not is_alive(pids[1]), "the third server never ended")
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
