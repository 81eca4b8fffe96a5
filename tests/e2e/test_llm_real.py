"""The Python API and the server say the same of the default model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve import LLM, SamplingParams
from tests.e2e.real_server import serving
from tests.unit.checkpoint.checkpoint_files import smollm2_file

PROMPTS = ["The capital of France is", "Once upon a time, there was a little girl", "1 2 3 4 5"]
MESSAGES = [{"role": "user", "content": "List the planets closest to the sun."}]
LIMITS = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "max_model_len": 256}


@pytest.mark.slow
def test_greedy_replies_are_those_of_the_server(programs: Path) -> None:
    flags = [word for name, value in LIMITS.items() for word in ("--" + name.replace("_", "-"), str(value))]
    path = smollm2_file()
    with serving(str(path), *flags, programs=programs) as server:
        body = {"prompt": PROMPTS, "max_tokens": 12, "temperature": 0, "logprobs": 0}
        status, _, reply = server.request("POST", "/v1/completions", body)
        assert status == 200
        texts = json.loads(reply)["choices"]
        chat = {"messages": MESSAGES, "max_tokens": 24, "temperature": 0, "logprobs": True}
        answer = json.loads(server.request("POST", "/v1/chat/completions", chat)[2])["choices"][0]
    with LLM(path, **LIMITS, cpu_kernels="xla", compile_cache=str(programs)) as llm:
        results = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12, logprobs=0))
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
    told = [entry[token].decoded_token for entry, token in zip(output.logprobs, output.token_ids, strict=True)]
    assert told == [token["token"] for token in answer["logprobs"]["content"]]
