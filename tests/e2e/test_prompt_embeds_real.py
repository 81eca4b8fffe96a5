"""Embeddings in place of a prompt through the official client and through `LLM`, on a tiny real model."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.errors import InvalidRequestError
from jaxserve.models.registry import open_model
from tests.e2e.real_server import model, serving_tiny
from tests.unit.frontend.prompt_embeds.tensor_files import npy, safetensors

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

IDS = list(range(20, 60))
LIMITS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 256,
    "kv_cache_memory": 64 << 20,
    "dtype": "float32",
}


def rows() -> np.ndarray:
    """The embeddings of IDS."""
    tensor = open_model(model().path).read("model.embed_tokens.weight")
    return np.array(tensor, np.float32)[IDS]


def test_a_server_continues_own_rows_as_their_ids(programs: Path) -> None:
    flags = [word for name, value in LIMITS.items() for word in ("--" + name.replace("_", "-"), str(value))]
    options: Any = {"model": "tiny", "max_tokens": 12, "temperature": 0}
    with serving_tiny(*flags, "--enable-prompt-embeds", programs=programs) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        text = client.completions.create(prompt=IDS, extra_body={"ignore_eos": True}, **options).choices[0].text
        files = [npy(rows()), safetensors(shape=rows().shape, data=rows().tobytes())]
        given = [base64.b64encode(file).decode() for file in files]
        extra = {"ignore_eos": True, "prompt_embeds": given}
        reply = client.completions.create(prompt="", extra_body=extra, **options)
        assert [choice.text for choice in reply.choices] == [text, text]
        stream = client.completions.create(
            prompt="", stream=True, extra_body={"ignore_eos": True, "prompt_embeds": given[0]}, **options
        )
        assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == text
        _, _, raw = server.request("GET", "/metrics")
        (line,) = [
            row for row in raw.decode().splitlines() if "compilations_total{" in row and 'phase="serving"' in row
        ]
        assert line.endswith(" 0.0") and "Traceback" not in server.output


def test_llm_continues_own_rows_as_their_ids(programs: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    options: dict[str, Any] = {"compile_cache": str(programs), "cpu_kernels": "xla", "enable_prompt_embeds": True}
    with LLM(model().path, **options, **LIMITS) as llm:
        expected, found, *_ = llm.generate([IDS, {"prompt_embeds": rows()}], params, progress_bar=False)
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        assert found.prompt_token_ids == [] and found.prompt is None
        with pytest.raises(InvalidRequestError, match=r"prompts\.prompt_embeds"):
            llm.generate({"prompt_embeds": rows()[:, :3]}, params, progress_bar=False)
