"""A tiny classifier over HTTP and from Python gives the labels and probabilities of transformers' pipeline."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jaxserve import LLM
from jaxserve.errors import InvalidRequestError
from tests.e2e.real_server import serving
from tests.engine.test_sentence_models import SENTENCES
from tests.models.goldens import label_golden

GOLDEN = label_golden("roberta_topics_tiny")
TOPICS = ("sports", "weather", "music")
LIMITS = {"max_num_batched_tokens": 64, "max_num_seqs": 8}


@pytest.mark.slow
def test_a_server_labels_texts(programs: Path) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in LIMITS.items()]
    with serving(str(GOLDEN.path), *flags, "--cpu-kernels", "xla", programs=programs) as server:
        assert "/v1/classify" in next(line for line in server.lines if "jaxserve is ready" in line)
        status, headers, body = server.request("POST", "/classify", {"input": list(SENTENCES)})
        assert (status, headers["x-weight-version"]) == (200, "0")
        data = json.loads(body)["data"]
        np.testing.assert_allclose([each["probs"] for each in data], GOLDEN.probabilities, atol=1e-4)
        best = GOLDEN.probabilities.argmax(axis=1)
        assert [each["label"] for each in data] == [TOPICS[index] for index in best]


@pytest.mark.slow
def test_python_labels_texts_and_names_what_the_model_does_not_do(programs: Path) -> None:
    with LLM(GOLDEN.path, compile_cache=str(programs), cpu_kernels="xla", **LIMITS) as llm:
        results = llm.classify(list(SENTENCES), progress_bar=False)
        found = np.array([result.outputs.probs for result in results])
        np.testing.assert_allclose(found, GOLDEN.probabilities, atol=1e-4)
        assert [result.outputs.label for result in results] == [TOPICS[index] for index in found.argmax(axis=1)]
        assert (results[0].prompt, results[0].outputs.num_classes) == (SENTENCES[0], 3)
        [by_ids] = llm.classify(results[1].prompt_token_ids, progress_bar=False)
        np.testing.assert_allclose(by_ids.outputs.probs, found[1], atol=1e-6)
        for call in (lambda: llm.embed("a"), lambda: llm.score("a", "b")):
            with pytest.raises(InvalidRequestError, match="is a classifier"):
                call()
