"""lm-eval's `local-completions`, with tasks and data from this folder; it asks the server for tokens, too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.lane import API_KEY, library, require_lane
from tests.e2e.http_server import Server

require_lane()

DATA = Path(__file__).parent / "data"
NUM_CAPITALS = len((DATA / "capitals.jsonl").read_text(encoding="utf-8").splitlines())
SOURCE: dict[str, Any] = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(DATA / "capitals.jsonl")}},
    "test_split": "test",
    "num_fewshot": 0,
}
CHOOSE = SOURCE | {
    "task": "choose_capital",
    "output_type": "multiple_choice",
    "doc_to_text": "The capital of {{country}} is",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{label}}",
    "metric_list": [{"metric": "acc"}],
}
WRITE = SOURCE | {
    "task": "write_capital",
    "output_type": "generate_until",
    "doc_to_text": "The capital of Egypt is Cairo.\nThe capital of Norway is Oslo.\nThe capital of {{country}} is",
    "doc_to_target": " {{choices[label]}}.",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
    "metric_list": [{"metric": "exact_match"}],
}


@pytest.fixture(scope="module")
def lm_eval(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Keep lm-eval from the network, and give it a private data cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("huggingface")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("OPENAI_API_KEY", API_KEY)
        library("lm_eval.tasks")
        yield library("lm_eval")


def evaluate(lm_eval: Any, server: Server, task: dict[str, Any], **options: object) -> dict[str, Any]:
    """Return the results of one task, with lm-eval's defaults except `options`."""
    arguments = {
        "model": "SmolLM2-135M-Instruct",
        "base_url": f"{server.url}/v1/completions",
        "auth_token": API_KEY,
        "max_length": 1024,
        **options,
    }
    manager = lm_eval.tasks.TaskManager(include_defaults=False)
    done = lm_eval.simple_evaluate(
        model="local-completions", model_args=arguments, tasks=[task], task_manager=manager, bootstrap_iters=0
    )
    return {"samples": done["samples"][task["task"]], **done["results"][task["task"]]}


def test_choices_are_ranked_by_their_likelihood(lm_eval: Any, smollm2: Server) -> None:
    results = evaluate(lm_eval, smollm2, CHOOSE)
    assert len(results["samples"]) == NUM_CAPITALS
    assert results["acc,none"] >= 5 / NUM_CAPITALS
    scores = [pair for sample in results["samples"] for [pair] in sample["resps"]]
    assert any(is_greedy in (True, "True") for _, is_greedy in scores), "the model would have said it by itself"
    assert all(float(score) < 0 for score, _ in scores)


def test_batches_and_concurrent_requests_score_the_same(lm_eval: Any, smollm2: Server) -> None:
    def scores(**options: object) -> list[float]:
        samples = evaluate(lm_eval, smollm2, CHOOSE, **options)["samples"]
        return [float(pair[0]) for sample in samples for [pair] in sample["resps"]]

    alone = scores()
    assert scores(batch_size=6) == pytest.approx(alone, abs=1e-3)
    assert scores(num_concurrent=4) == pytest.approx(alone, abs=1e-3)
    assert scores(tokenized_requests=False) == pytest.approx(alone, abs=1e-3)


def test_written_answers(lm_eval: Any, smollm2: Server) -> None:
    results = evaluate(lm_eval, smollm2, WRITE)
    assert results["exact_match,none"] >= 4 / NUM_CAPITALS, results["samples"]
