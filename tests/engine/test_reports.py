"""Tokens of a call of several decode steps are sent as they are made, by programs with native kernels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from jaxserve_kernels.native import Reports
from jaxserve_kernels.native.build import BuildError, build

from jaxserve.ipc.messages import AddRequest
from jaxserve.runner.runner import Runner
from tests.engine.model_engine import MODEL_NAME, ModelEngine, request
from tests.models.goldens import golden_checkpoint


@pytest.fixture(scope="module")
def served() -> Iterator[ModelEngine]:
    try:
        build()
    except BuildError as error:
        pytest.skip(f"native kernels: {error}")
    path = golden_checkpoint(MODEL_NAME).path
    engine = ModelEngine(path, max_num_seqs=4, max_num_batched_tokens=16, cpu_kernels="native", reports_tokens=True)
    yield engine
    engine.close()


def items() -> list[AddRequest]:
    """Requests of other lengths; one wants log-probabilities, which come with results."""
    options = {"temperature": 1.0, "max_tokens": 40}
    return [
        *(request(str(i), np.arange(5 + i, 12 + 3 * i), seed=i, **options) for i in range(3)),
        request("scored", np.arange(9, 30), seed=7, num_top_logprobs=0, **options),
    ]


def sizes_of_outputs(engine: ModelEngine) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Run the requests; returns their tokens, and how many came at once."""
    engine.restart(max_burst_ms=1e6)
    tokens: dict[str, list[int]] = {}
    sizes: dict[str, list[int]] = {}
    for item in items():
        assert engine.core.handle(item) == []
    while engine.core.has_work:
        step = engine.core.step()
        for output in [] if step is None else step.outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            sizes.setdefault(output.request_id, []).append(len(output.token_ids))
    return tokens, sizes


def test_tokens_come_one_by_one_and_are_the_same(served: ModelEngine) -> None:
    tokens, sizes = sizes_of_outputs(served)
    runner = served.executor._runner
    assert isinstance(runner, Runner)
    assert runner.reports is not None
    runner.reports.close()
    runner.reports = None
    expected, sizes_of_calls = sizes_of_outputs(served)
    runner.reports = Reports()
    assert tokens == expected
    for name in ("0", "1", "2"):
        assert max(sizes[name]) == 1
        assert max(sizes_of_calls[name]) > 4
    assert max(sizes["scored"]) > 4


def test_an_engine_goes_on_after_tokens_that_no_client_read(served: ModelEngine) -> None:
    """Results are read at once: what their loops have reported is forgotten."""
    assert isinstance(served.executor._runner, Runner)
    assert served.executor._runner.reports is not None
    alone = sizes_of_outputs(served)[0]
    for _ in range(2):
        served.restart(max_burst_ms=1e6)
        served.run([request("scored", np.arange(9, 30), max_tokens=40, num_top_logprobs=0)])
        assert sizes_of_outputs(served)[0] == alone
