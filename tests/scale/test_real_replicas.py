"""Three engines with SmolLM2 on one port, through the official client."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from tests.e2e.http_server import until
from tests.e2e.real_server import serving_smollm2
from tests.e2e.test_replicas import engines_of, per_engine
from tests.programs import shared_programs

pytestmark = [pytest.mark.slow, pytest.mark.scale, pytest.mark.optimized, pytest.mark.timeout(600)]


def test_three_engines_answer_the_official_client_alike_and_one_may_die() -> None:
    flags = ("--replicas", "3", "--routing", "round-robin", "--max-num-seqs", "2")
    with serving_smollm2(*flags, programs=Path(shared_programs())) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)

        def ask(question: str) -> str:
            reply = client.chat.completions.create(
                model="SmolLM2-135M-Instruct",
                messages=[{"role": "user", "content": question}],
                max_tokens=12,
                temperature=0,
            )
            return str(reply.choices[0].message.content)

        question = "Name the capital of France."
        with ThreadPoolExecutor(3) as pool:
            assert len(set(pool.map(ask, [question] * 6))) == 1
        counts = per_engine(server, "generation_tokens_total")
        assert len(set(counts)) == 1 and counts[0] > 0, counts
        os.kill(engines_of(server)[2], signal.SIGKILL)
        until(lambda: "replica 2: the engine process was ended by signal 9" in server.output, "it was not noticed")
        stream = client.completions.create(model="SmolLM2-135M-Instruct", prompt="Once", max_tokens=8, stream=True)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        with ThreadPoolExecutor(3) as pool:
            assert len(set(pool.map(ask, [question] * 4))) == 1
        until(lambda: "replica 2: the engine is back after" in server.output, "it never came back", 120)
        assert server.stop() == 0
