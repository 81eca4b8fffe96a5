"""`docs/rollouts.md`: its program and its requests, on a tiny model."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.http_server import ROOT, Server
from tests.e2e.real_server import BATCH_PROGRAMS, model, serving

pytestmark = [pytest.mark.slow]
PAGE = (ROOT / "docs" / "rollouts.md").read_text(encoding="utf-8")
STEPS = re.findall(r"^\| ([\w ]+) \| `(/\S+)` \| `(\{.*\})` \|$", PAGE, re.M)
STEP_FOLDER = "checkpoints/step-200"


def test_the_program_runs_and_scores_what_it_sampled(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    limits = f'compile_cache="{programs}", max_num_seqs=16, max_num_batched_tokens=32, cpu_kernels="xla"'
    code = code.replace('LLM("models/policy"', f'LLM("{model().path}", {limits}').replace(
        STEP_FOLDER, str(model().path)
    )
    names: dict[str, Any] = {}
    exec(code, names)
    outputs = names["result"].outputs
    assert [len(output.token_ids) for output in outputs] == [16] * 4
    assert names["version"] == 1
    assert outputs[0].weight_versions == [0] * 16
    sampled = [entry[token].logprob for entry, token in zip(outputs[0].logprobs, outputs[0].token_ids, strict=True)]
    assert names["again"] == pytest.approx(sampled, abs=1e-4)  # the same weights again
    assert len(capsys.readouterr().out.splitlines()) == 9


def test_each_request_of_the_table_does_what_the_page_says(programs: Path) -> None:
    [shown] = re.findall(r"^jaxserve serve models/policy (.*)$", PAGE, re.M)
    flags = (*shown.split(), "--served-model-name", "policy", "--dtype", "float32", *BATCH_PROGRAMS)
    replies: dict[str, Any] = {}
    with serving(str(model().path), *flags, programs=programs) as server:
        for step, path, body in STEPS:
            replies[step] = post(server, path, json.loads(body.replace(STEP_FOLDER, str(model().path))))
            match step:
                case "stop between steps":
                    assert json.loads(server.request("GET", "/is_paused")[2]) == {"is_paused": True}
                case "give the memory back":
                    assert json.loads(server.request("GET", "/is_sleeping")[2]) == {"is_sleeping": True}
        assert list(replies) == [step for step, *_ in STEPS]
        again = json.loads(STEPS[0][2])
        after = post(server, STEPS[0][1], again)
        scored = json.loads(STEPS[1][2])
        first = replies["sample"]["choices"][0]
        scored["prompt"] = [*first["prompt_token_ids"], *first["token_ids"]]
        scores = post(server, STEPS[1][1], scored)["choices"][0]["prompt_logprobs"]
    assert len(STEPS) == 7
    choices = replies["sample"]["choices"]
    assert len(choices) == 4
    for choice in choices:
        assert choice["prompt_token_ids"] == again["prompt"]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == 16
    given = replies["score given tokens"]["choices"][0]["prompt_logprobs"]
    assert (len(given), given[0]) == (6, None)
    assert replies["new weights"] == {"status": "done", "weight_version": 1}
    assert replies["sample"]["metrics"]["weight_version_tokens"] == {"0": 64}
    assert after["metrics"]["weight_version"] == 1
    replayed = [entry[str(token)]["logprob"] for entry, token in zip(scores[4:], first["token_ids"], strict=True)]
    for one, other in zip(replayed, first["logprobs"]["token_logprobs"], strict=True):
        assert math.isclose(one, other, abs_tol=1e-4)


def post(server: Server, path: str, body: Any) -> Any:
    status, _, reply = server.request("POST", path, body)
    assert status == 200, reply
    return json.loads(reply)
