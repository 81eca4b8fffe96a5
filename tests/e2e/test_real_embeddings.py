"""`jaxserve serve` on MiniLM and on SmolLM2 as users start it, through the openai client."""

from __future__ import annotations

import json
import os
import runpy
import signal
from pathlib import Path

import numpy as np
import openai
import pytest

from tests.e2e.http_server import ROOT, until
from tests.e2e.real_server import BATCH_PROGRAMS, model, serving
from tests.e2e.test_replicas import engines_of
from tests.models.goldens import decoder_vectors, minilm_golden
from tests.tools.embedding_texts import DECODER_PROMPTS, MINILM_TEXTS
from tests.unit.checkpoint.checkpoint_files import minilm_directory, smollm2_file


@pytest.mark.slow
@pytest.mark.optimized
def test_minilm_serves_vectors_and_rankings_and_compiles_nothing(programs: Path) -> None:
    golden = minilm_golden().vectors["mean"]
    words = (str(minilm_directory()), "--served-model-name", "minilm", "--max-num-batched-tokens", "256")
    with serving(*words, programs=programs) as server:
        assert "/v1/embeddings" in next(line for line in server.lines if "jaxserve is ready" in line)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            reply = client.embeddings.create(model="minilm", input=list(MINILM_TEXTS) * 8)
            found = np.array([item.embedding for item in reply.data]).reshape(8, *golden.shape)
            assert (found * golden).sum(axis=-1).min() >= 0.9999
            np.testing.assert_allclose(found, np.broadcast_to(found[0], found.shape), atol=1e-5)
            with pytest.raises(openai.BadRequestError, match="256 tokens") as caught:
                client.embeddings.create(model="minilm", input="too long " * 300)
            assert caught.value.code == "context_length_exceeded"
            with pytest.raises(openai.BadRequestError, match="does not generate"):
                client.completions.create(model="minilm", prompt="a")
        _, _, body = server.request("POST", "/v1/rerank", {"query": MINILM_TEXTS[5], "documents": list(MINILM_TEXTS)})
        results = json.loads(body)["results"]
        assert [result["index"] for result in results[:2]] == [5, 6], "itself, then the other one about bread"
        assert server.metric('compilations_total{engine="0",model_name="minilm",phase="serving"') == 0
        assert server.metric('bucket_steps_total{bucket="256"') > 0
        assert "Traceback" not in server.output


@pytest.mark.slow
@pytest.mark.optimized
def test_vectors_are_served_beside_generation_and_their_engine_may_die(programs: Path, tmp_path: Path) -> None:
    golden, text = minilm_golden().vectors["mean"], model()
    file = tmp_path / "server.yaml"
    own = f"{{model: {minilm_directory()}, max_num_batched_tokens: 256, max_num_seqs: 32}}"
    file.write_text(f"models:\n  tiny: {text.path}\n  vectors: {own}\n")
    with serving("--config", str(file), *BATCH_PROGRAMS, programs=programs) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            assert [one.id for one in client.models.list()] == ["tiny", "vectors"]
            with pytest.raises(openai.NotFoundError, match="Served here: tiny, vectors"):
                client.embeddings.create(model="other", input="a")
            with pytest.raises(openai.BadRequestError, match="`vectors` embeds texts"):
                client.completions.create(model="vectors", prompt="a")
            stream = client.completions.create(model="tiny", prompt="a", max_tokens=200, temperature=0, stream=True)
            parts = [next(stream).choices[0].text]
            os.kill(engines_of(server)[1], signal.SIGKILL)
            parts += [chunk.choices[0].text for chunk in stream]
            whole = client.completions.create(model="tiny", prompt="a", max_tokens=200, temperature=0)
            assert "".join(parts) == whole.choices[0].text, "its stream went on"
            until(lambda: "vectors: the engine is back after" in server.output, "it never came back")
            reply = client.embeddings.create(model="vectors", input=list(MINILM_TEXTS))
            found = np.array([item.embedding for item in reply.data])
            assert (found * golden).sum(axis=-1).min() >= 0.9999
        restarts, compiled = "engine_restarts_total", "compilations_total"
        assert server.metric(f'{restarts}{{engine="0",model_name="tiny"}}') == 0
        assert server.metric(f'{restarts}{{engine="0",model_name="vectors"}}') == 1
        for name in ("tiny", "vectors"):
            assert server.metric(f'{compiled}{{engine="0",model_name="{name}",phase="serving"') == 0
        assert "Traceback" not in server.output


@pytest.mark.slow
@pytest.mark.optimized
def test_smollm2_embeds_when_it_is_asked_to(programs: Path) -> None:
    golden = decoder_vectors("smollm2").vectors["last"]
    words = (str(smollm2_file()), "--task", "embed", "--max-num-batched-tokens", "16", "--max-num-seqs", "4")
    with serving(*words, "--served-model-name", "smol", programs=programs) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            reply = client.embeddings.create(model="smol", input=list(DECODER_PROMPTS[:3]))
        nearest = runpy.run_path(str(ROOT / "examples" / "retrieval.py"))["nearest"]
        assert nearest(server.url, DECODER_PROMPTS[1], list(DECODER_PROMPTS[:3]), 1) == [DECODER_PROMPTS[1]]
        found = np.array([item.embedding for item in reply.data])
        expected = (golden / np.linalg.norm(golden, axis=1, keepdims=True))[:3]
        assert (found * expected).sum(axis=1).min() >= 0.9999
