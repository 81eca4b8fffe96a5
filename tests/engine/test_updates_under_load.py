"""100 updates of the weights under load: nothing is compiled or lost, and each token is that of a fresh server."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from jaxserve_kernels.native.build import BuildError, build

from jaxserve.ipc.messages import AddRequest, TokenLogprobs
from tests.engine.model_engine import MODEL_NAME, ModelEngine, request
from tests.engine.test_weight_updates import Operator, changed
from tests.models.goldens import DATA

pytestmark = [pytest.mark.slow]
NUM_UPDATES = 100
NUM_RUNNING = 6
FACTORS = (1.0, -0.7, 1.3)
"""By which the matrices are multiplied; version v has factor v modulo their number."""
Token = tuple[int, int, TokenLogprobs]
"""The version that a token is marked with, its id and its log-probability."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A checkpoint for each version."""
    base = tmp_path_factory.mktemp("versions")
    return [changed(base / str(index), factor) for index, factor in enumerate(FACTORS)]


def start(folder: Path) -> ModelEngine:
    """Return an engine whose replies have the same bits whatever else runs."""
    return ModelEngine(folder, cpu_kernels="native", max_num_seqs=8, max_num_batched_tokens=64)


@pytest.fixture(scope="module")
def engine() -> Iterator[ModelEngine]:
    try:
        build()
    except BuildError as error:
        pytest.skip(f"native kernels: {error}")
    engine = start(DATA / MODEL_NAME)
    yield engine
    engine.close()


class Load:
    """Keeps some requests running, greedy and sampled, and collects their tokens with their versions."""

    def __init__(self, engine: ModelEngine) -> None:
        self.engine = engine
        self.requests: dict[str, AddRequest] = {}
        self.tokens: dict[str, list[Token]] = {}
        self.ends: dict[str, str] = {}
        self._rng = random.Random(0)

    def fill(self) -> None:
        while len(self.requests) - len(self.ends) < NUM_RUNNING:
            self._send()

    def _send(self) -> None:
        number, rng = len(self.requests), self._rng
        options = {"temperature": (0.0, 0.8)[number % 2], "seed": number, "num_top_logprobs": 0}
        prompt = [rng.randrange(3, 300) for _ in range(rng.choice((1, 20, 45)))]
        message = request(f"{number}", prompt, max_tokens=rng.randrange(8, 40), **options)
        self.requests[message.request_id], self.tokens[message.request_id] = message, []
        assert self.engine.core.handle(message) == []

    def step(self) -> None:
        step = self.engine.core.step()
        for output in [] if step is None else step.outputs:
            scores = zip(output.token_ids, output.logprobs or [], strict=True)
            self.tokens[output.request_id] += [(output.weight_version, *scored) for scored in scores]
            if output.finish_reason is not None:
                assert output.request_id not in self.ends
                self.ends[output.request_id] = output.finish_reason

    def segments(self, version: int) -> Iterator[tuple[AddRequest, list[Token]]]:
        """Yield, for each request with tokens of a version, a request for these alone, and the tokens."""
        for name, message in self.requests.items():
            own = [token for token in self.tokens[name] if token[0] == version]
            if own:
                before = [token for number, token, _ in self.tokens[name] if number < version]
                options = {"temperature": message.sampling.temperature, "seed": message.sampling.seed}
                prompt = [*message.prompt_token_ids, *before]
                yield request(f"{name}-{version}", prompt, max_tokens=len(own), num_top_logprobs=0, **options), own


def test_a_hundred_updates_under_load(engine: ModelEngine, folders: list[Path]) -> None:
    """From a folder and from a file with tensors, in turns. The other engines were started with the weights of a version."""
    engine.restart(max_burst_ms=0)
    operator, load, rng = Operator(engine), Load(engine), random.Random(1)
    num_compilations = engine.executor.compilations()
    for version in range(1, NUM_UPDATES + 1):
        folder = folders[version % len(folders)]
        source = {"tensors": str(folder / "model.safetensors")} if version % 2 else {"model": str(folder)}
        operator.command("update_weights", **source)
        for _ in range(rng.randrange(2, 6)):
            load.fill()
            load.step()
    while engine.core.has_work:
        load.step()
    assert engine.executor.compilations() == num_compilations
    assert [(error, state.weight_version) for error, state in operator.ends] == [
        (None, version) for version in range(1, NUM_UPDATES + 1)
    ]
    assert load.ends == dict.fromkeys(load.requests, "length")
    for name, message in load.requests.items():
        versions = [version for version, _, _ in load.tokens[name]]
        assert versions == sorted(versions)
        assert len(versions) == message.sampling.max_tokens
    segments = [(version, *found) for version in range(NUM_UPDATES + 1) for found in load.segments(version)]
    assert len({version for version, _, _ in segments}) > NUM_UPDATES // 2
    for index, folder in enumerate(folders):
        expected = {item.request_id: tokens for version, item, tokens in segments if version % len(folders) == index}
        items = [item for _, item, _ in segments if item.request_id in expected]
        fresh = start(folder)
        found = fresh.run(items)
        fresh.close()
        assert found.keys() == expected.keys()
        for name, result in found.items():
            assert [(token, scores) for _, token, scores in expected[name]] == list(
                zip(result.token_ids, result.logprobs, strict=True)
            )
