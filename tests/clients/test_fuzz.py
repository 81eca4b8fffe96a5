"""Valid and invalid requests generated from `/openapi.json`: no 5xx, no hang, and replies that match the document."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.lane import API_KEY, library
from tests.e2e.http_server import TOKENIZER, Server, running

schemathesis = library("schemathesis")
checks = library("schemathesis.checks")
specs = library("schemathesis.specs.openapi.checks")
hypothesis = library("hypothesis")

REPLY_TIMEOUT_S = 20
CHECKS = [
    checks.not_a_server_error,
    specs.status_code_conformance,
    specs.content_type_conformance,
    specs.response_headers_conformance,
    specs.response_schema_conformance,
]
"""A request that the document allows may be rejected: the document does not say which fields go together."""


@pytest.fixture(scope="module")
def brief() -> Iterator[Server]:
    """A fake engine whose replies are always short."""
    model = {"model": str(TOKENIZER), "served_model_name": "tiny", "max_model_len": 256}
    with running({"vocab_size": 389}, model=model) as server:
        yield server
        assert "Traceback" not in server.output, server.output


@pytest.fixture(scope="module")
def embedder() -> Iterator[Server]:
    """A fake engine that embeds."""
    model = {"model": str(TOKENIZER), "served_model_name": "tiny", "task": "embed"}
    with running({"vocab_size": 389}, model=model) as server:
        yield server
        assert "Traceback" not in server.output, server.output


def test_the_document_is_valid_openapi(brief: Server) -> None:
    library("openapi_spec_validator").validate(json.loads(brief.request("GET", "/openapi.json")[2]))


def fuzz(server: Server, folder: Path, *more: str) -> None:
    names = [*(check.__name__ for check in CHECKS), "unsupported_method"]
    options = f"--checks {','.join(names)} --phases coverage,fuzzing --mode all --max-examples 15 --no-color"
    options += f" --generation-deterministic --request-timeout {REPLY_TIMEOUT_S}"
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", *options.split(), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout


@pytest.mark.timeout(960)
def test_no_request_upsets_the_server(brief: Server, tmp_path: Path) -> None:
    fuzz(brief, tmp_path)
    assert brief.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200


@pytest.mark.timeout(960)
def test_no_request_upsets_a_server_that_embeds(embedder: Server, tmp_path: Path) -> None:
    fuzz(embedder, tmp_path, "--include-path-regex", "embeddings|score|rerank")
    assert embedder.request("POST", "/v1/embeddings", {"input": "x"})[0] == 200


@pytest.mark.parametrize(
    ("path", "limit"),
    [
        ("/v1/chat/completions", "max_completion_tokens"),
        ("/v1/completions", "max_tokens"),
        ("/v1/messages", "max_tokens"),
        ("/v1/responses", "max_output_tokens"),
    ],
)
def test_no_request_upsets_the_model(smollm2: Server, path: str, limit: str) -> None:
    headers = {"Authorization": f"Bearer {API_KEY}"}
    schema = schemathesis.openapi.from_url(f"{smollm2.url}/openapi.json", headers=headers)

    @hypothesis.given(case=schema[path]["POST"].as_strategy())
    @hypothesis.settings(
        max_examples=12,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    def ask(case: Any) -> None:
        case.body[limit] = 3
        case.call_and_validate(timeout=REPLY_TIMEOUT_S, checks=CHECKS, headers=headers)

    ask()
