"""`jaxserve bench startup` with small servers in place of the real one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxserve.cli import bench
from jaxserve.cli.bench import print_startup
from jaxserve.cli.main import main
from jaxserve.tools.bench.startup import StartFailedError, measure_startup

SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
cache = Path(options["--compile-cache"])
is_warm = cache.exists()
is_full = (cache / "all").exists()
cache.mkdir(exist_ok=True)
if options.get("--warmup") == "all":
    (cache / "all").touch()
with open(options["--log"], "a") as log:
    kind = "fills" if "--warmup" in options else "warm" if is_full else "partly" if is_warm else "cold"
    print("changed" if "--max-model-len" in options else kind, file=log)

class Handler(BaseHTTPRequestHandler):
    left = 0 if is_warm else 3

    def do_GET(self):
        Handler.left -= 1
        self.send_response(200 if Handler.left < 0 else 503)
        self.end_headers()

    def log_message(self, *args):
        pass

HTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()
"""


def test_first_start_is_cold_and_the_others_find_the_cache(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    log = tmp_path / "starts"
    command = [sys.executable, "-S", str(script), "--log", str(log)]
    figures = measure_startup(command, num_warm=2, timeout_s=60.0)
    assert log.read_text().split() == ["cold", "fills", "warm", "warm"]
    assert len(figures["warm_ready_s"]) == 2
    assert 0 < figures["cold_listening_s"] < figures["cold_ready_s"]
    assert "changed_ready_s" not in figures


def test_bench_startup_measures_a_server_without_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def measure(command: Sequence[str], **options: Any) -> dict[str, Any]:
        given.append(options["environment"])
        raise StartFailedError("no start")

    monkeypatch.setattr(bench, "measure_startup", measure)
    monkeypatch.setenv("JAXSERVE_SSL_CERTFILE", "chain.pem")
    monkeypatch.setenv("JAXSERVE_MAX_NUM_SEQS", "7")
    assert main(["bench", "startup"]) == 1
    assert "JAXSERVE_SSL_CERTFILE" not in given[0]
    assert given[0]["JAXSERVE_MAX_NUM_SEQS"] == "7"


def test_further_starts_have_the_changed_flags_and_the_same_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    log = tmp_path / "starts"
    command = [sys.executable, "-S", str(script), "--log", str(log)]
    changed = ["--max-model-len", "64"]
    figures = measure_startup(command, num_warm=1, timeout_s=60.0, changed=changed)
    assert log.read_text().split() == ["cold", "fills", "warm", "changed"]
    assert (figures["changed"], len(figures["changed_ready_s"])) == ("--max-model-len 64", 1)
    print_startup(figures)
    assert [
        line.split("median")[0].strip(" │,") for line in capsys.readouterr().out.splitlines() if "median" in line
    ] == [
        "warm",
        "--max-model-len 64",
    ]


def test_a_server_that_ends_is_reported_with_its_last_words() -> None:
    command = [sys.executable, "-S", "-c", "import sys; sys.exit('no such model')"]
    with pytest.raises(StartFailedError, match=r"exit code 1 before it was ready\nno such model"):
        measure_startup(command, num_warm=0, timeout_s=60.0)


def test_a_server_that_never_gets_ready_is_stopped() -> None:
    command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    with pytest.raises(StartFailedError, match=r"not ready after 0\.2 s"):
        measure_startup(command, num_warm=0, timeout_s=0.2)
