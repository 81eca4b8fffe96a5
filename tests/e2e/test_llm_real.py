"""The Python API and the server say the same of the default model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve import LLM, SamplingParams
from tests.e2e.real_server import serving_smollm2
from tests.smollm2 import LIMITS
from tests.unit.checkpoint.checkpoint_files import smollm2_file

PROMPTS = ["The capital of France is", "Once upon a time, there was a little girl", "1 2 3 4 5"]
MESSAGES = [{"role": "user", "content": "List the planets closest to the sun."}]


@pytest.mark.slow
@pytest.mark.optimized
def test_greedy_replies_are_those_of_the_server(programs: Path, tmp_path: Path) -> None:
    body = {"prompt": PROMPTS, "max_tokens": 12, "temperature": 0, "logprobs": 0}
    chat = {"messages": MESSAGES, "max_tokens": 24, "temperature": 0, "logprobs": True}
    with serving_smollm2(programs=programs) as server:
        status, _, reply = server.request("POST", "/v1/completions", body)
        assert status == 200
        texts = json.loads(reply)["choices"]
        answer = json.loads(server.request("POST", "/v1/chat/completions", chat)[2])["choices"][0]
    recommended = tmp_path / "generation_config.json"
    recommended.write_text(json.dumps({"temperature": 0, "top_k": 7}))
    settings = {"compile_cache": str(programs), "generation_config": str(recommended)}
    with LLM(smollm2_file(), **LIMITS, **settings) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0, top_k=7)
        [[greedy]] = [result.outputs for result in llm.generate(PROMPTS[0])]
        results = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12, logprobs=0))
        assert greedy.text.startswith(results[0].outputs[0].text)
        [said] = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=24, logprobs=0))
    for result, choice in zip(results, texts, strict=True):
        [output] = result.outputs
        assert output.logprobs is not None
        assert output.text == choice["text"]
        spelled = [entry[token] for entry, token in zip(output.logprobs, output.token_ids, strict=True)]
        assert [token.decoded_token for token in spelled] == choice["logprobs"]["tokens"]
        assert [token.logprob for token in spelled] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
        assert output.finish_reason == choice["finish_reason"]
    [output] = said.outputs
    assert output.logprobs is not None
    assert (output.text, output.finish_reason) == (answer["message"]["content"], answer["finish_reason"])
    decoded = [entry[token].decoded_token for entry, token in zip(output.logprobs, output.token_ids, strict=True)]
    assert decoded == [token["token"] for token in answer["logprobs"]["content"]]
