"""A response is the reply to the chat that it stands for, on a real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.real_server import serving_smollm2

pytestmark = [pytest.mark.slow, pytest.mark.optimized]

LOGPROBS: Any = ["message.output_text.logprobs"]


def test_responses_say_what_chat_completions_say(programs: Path) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    options: Any = {"model": "SmolLM2-135M-Instruct", "temperature": 0}
    with (
        serving_smollm2(programs=programs) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        chat = client.chat.completions.create(**options, messages=messages, logprobs=True).choices[0]
        response = client.responses.create(
            **options, input=messages[1]["content"], instructions="Be brief.", include=LOGPROBS
        )
        assert response.output_text == chat.message.content
        assert "Paris" in response.output_text
        (message,) = response.output
        assert message.type == "message"
        (part,) = message.content
        assert part.type == "output_text"
        assert part.logprobs
        assert "".join(entry.token for entry in part.logprobs) == response.output_text
        with client.responses.stream(**options, input=messages[1:], instructions="Be brief.") as stream:
            assert stream.get_final_response().output_text == response.output_text

        messages += [{"role": "assistant", "content": chat.message.content}, {"role": "user", "content": "And Italy?"}]
        on = client.chat.completions.create(**options, messages=messages, max_tokens=30)
        continued = client.responses.create(
            **options,
            input="And Italy?",
            instructions="Be brief.",
            previous_response_id=response.id,
            max_output_tokens=30,
        )
        assert continued.output_text == on.choices[0].message.content
        assert continued.usage is not None
        assert on.usage is not None
        assert continued.usage.input_tokens == on.usage.prompt_tokens
        assert continued.usage.input_tokens_details.cached_tokens > 0
