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
from tests.e2e.real_server import serving, serving_smollm2
from tests.smollm2 import LIMITS
from tests.unit.checkpoint.checkpoint_files import minilm_directory, smollm2_file

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


def test_the_default_model_makes_one_call_where_a_call_is_required(server: Server) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    question = {"role": "user", "content": "Weather in Paris?"}
    body = {"messages": [question], "tools": [tool], "tool_choice": "required", "temperature": 0, "max_tokens": 200}
    status, headers, reply = server.request("POST", "/v1/chat/completions", body)
    assert (status, headers["x-jaxserve-tool-format"]) == (200, "generic")
    choice = json.loads(reply)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("get_weather", {"city": "Paris"})
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")


def test_a_batch_keeps_its_order(server: Server, tmp_path: Path) -> None:
    source, target = tmp_path / "prompts.jsonl", tmp_path / "replies.jsonl"
    prompts = ["The capital of France is", "Water boils at"]
    source.write_text("\n".join(json.dumps({"id": i, "prompt": text}) for i, text in enumerate(prompts)))
    run("batch.py", str(source), str(target), "--url", server.url, "--max-tokens", "4")
    replies = [json.loads(line) for line in target.read_text().splitlines()]
    assert [reply["id"] for reply in replies] == [0, 1]
    assert replies[0]["text"].startswith(" Paris")


def test_a_batch_in_process_has_the_replies_of_the_server(server: Server, programs: Path) -> None:
    batch = runpy.run_path(str(EXAMPLES / "batch.py"))
    prompts = ["The capital of France is", "Water boils at", "Two plus two is"]
    replies = batch["in_process"](None, prompts, 4, compile_cache=str(programs), **LIMITS)
    assert replies[0].startswith(" Paris")
    assert replies == batch["through_server"](server.url, prompts, 4)


@pytest.fixture(scope="module")
def both(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a chat model and an embedding model."""
    file = tmp_path_factory.mktemp("both") / "server.yaml"
    limits = ", ".join(f"{name}: {value}" for name, value in LIMITS.items())
    file.write_text(
        f"models:\n  chat: {{model: {smollm2_file()}, {limits}}}\n"
        f"  vectors: {{model: {minilm_directory()}, max_num_batched_tokens: 256, max_num_seqs: 32}}\n"
    )
    with serving("--config", str(file), programs=programs, cpu_kernels="auto") as running:
        yield running


PASSAGES = """The moon orbits the earth in 27 days.

A page of the KV cache has 16 tokens.

Bread is baked from flour, water, salt and yeast.
"""


def test_retrieval_finds_the_passage_and_answers_from_it(both: Server, tmp_path: Path) -> None:
    file = tmp_path / "passages.md"
    file.write_text(PASSAGES)
    question = "How many tokens does a page of the cache have?"
    found, answer = run("retrieval.py", question, str(file), "--url", both.url, "--count", "1").splitlines()[:2]
    assert found == "- 'A page of the KV cache has 16 tokens.'"
    assert "16" in answer


def test_status_of_two_models_has_a_part_for_each(both: Server) -> None:
    status = [sys.executable, "-m", "jaxserve.cli.main", "status", "--url", both.url]
    done = subprocess.run(status, capture_output=True, text=True, timeout=100, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [" ".join(line.split()) for line in lines[1:4]] == ["state serving", "models chat, vectors", "chat:"]
    assert "context 2,048" in next(line for line in lines if line.startswith("engine"))
    own = lines[lines.index("vectors:") :]
    assert any("vectors of 384, texts of up to 256 tokens" in line for line in own)
    assert not any(line.startswith("KV pages") for line in own)


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
