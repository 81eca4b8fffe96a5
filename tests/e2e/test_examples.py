"""The scripts of `examples/` run as their first lines say."""

from __future__ import annotations

import functools
import json
import runpy
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.e2e.chromium import BROWSER, tab
from tests.e2e.http_server import ROOT, Server
from tests.e2e.real_server import serving_smollm2

pytestmark = [pytest.mark.slow, pytest.mark.optimized]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """The origin that serves the folder of examples to a browser."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=EXAMPLES)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def server(programs: Path, site: str) -> Iterator[Server]:
    with serving_smollm2("--cors-allowed-origins", site, programs=programs) as running:
        yield running


def run(name: str, *words: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_agent_makes_the_default_model_call_a_function(server: Server) -> None:
    output = run("agent.py", "What is 12 times 7?", "--force", "--url", server.url)
    assert output.startswith("multiply({'a': 12, 'b': 7}) = 84\n")


def test_a_batch_keeps_its_order(server: Server, tmp_path: Path) -> None:
    source, target = tmp_path / "prompts.jsonl", tmp_path / "replies.jsonl"
    prompts = ["The capital of France is", "Water boils at"]
    source.write_text("\n".join(json.dumps({"id": i, "prompt": text}) for i, text in enumerate(prompts)))
    run("batch.py", str(source), str(target), "--url", server.url, "--max-tokens", "4")
    replies = [json.loads(line) for line in target.read_text().splitlines()]
    assert [reply["id"] for reply in replies] == [0, 1]
    assert replies[0]["text"].startswith(" Paris")


def test_an_answer_comes_from_the_passages(server: Server) -> None:
    answer = runpy.run_path(str(EXAMPLES / "retrieval.py"))["answer"]
    assert "16" in answer(server.url, "How many tokens has a page?", ["A page of the KV cache has 16 tokens."])


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: apt-get install chromium")
async def test_the_page_of_another_origin_streams(server: Server, site: str) -> None:
    async with tab() as page:
        await page.open(f"{site}/page.html?url={server.url}")
        await page.run("document.getElementById('send').click()")
        await page.until("document.getElementById('reply').dataset.state === 'done'")
        assert await page.run("document.getElementById('reply').textContent.length") > 10
