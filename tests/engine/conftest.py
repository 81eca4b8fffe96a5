"""One engine for all tests that only send requests, whose programs take longer to compile than the tests, and drafts in every step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jaxserve.scheduler.speculation import Payoff
from tests.engine.model_engine import MODEL_NAME, ModelEngine
from tests.models.goldens import golden_checkpoint


@pytest.fixture(scope="session")
def engine() -> Iterator[ModelEngine]:
    """Up to 16 requests and 64 tokens a step. Begin with `restart`."""
    engine = ModelEngine(
        golden_checkpoint(MODEL_NAME).path,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        has_all_buckets=True,
        has_all_options=True,
    )
    yield engine
    engine.close()


@pytest.fixture
def speculates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speculate whether it pays or not: that depends on the machine."""
    monkeypatch.setattr(Payoff, "choose", lambda self, num_rows: "speculate")
