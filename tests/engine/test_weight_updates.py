"""Updates of the weights of a running engine: the tokens of a fresh engine with those weights, without a compilation."""

from __future__ import annotations

import gc
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.checkpoint.huggingface import open_tensors
from jaxserve.checkpoint.safetensors_file import open_safetensors
from jaxserve.config import Config, ModelConfig, SchedulerConfig
from jaxserve.engine.adapters import AdapterPlaces
from jaxserve.engine.control import EngineControl
from jaxserve.errors import CheckpointError
from jaxserve.executor.fake.executor import FakeWeights
from jaxserve.executor.preparation import prepare
from jaxserve.ipc.messages import (
    AddRequest,
    Command,
    CommandName,
    CommandOptions,
    EngineState,
    ErrorInfo,
    PauseMode,
    RequestOutput,
)
from jaxserve.models.registry import decoder_of, families, open_model
from jaxserve.sampling.params import EngineSamplingParams
from jaxserve.scheduler.embedding import EmbedScheduler
from jaxserve.scheduler.plan import Buckets
from jaxserve.types import RequestId, place_of
from jaxserve.weights.loader import load_changed
from jaxserve.weights.reader import TensorReader
from tests.engine.model_engine import MODEL_NAME, Generated, ModelEngine, request
from tests.engine.rig import Rig, add, expected, prompt
from tests.models.goldens import DATA, adapter_goldens
from tests.unit.checkpoint.checkpoint_files import write_safetensors

MODEL = DATA / MODEL_NAME
PROMPTS = {"a": list(range(3, 60)), "b": list(range(40, 70)), "c": [9, 8, 7]}
OPTIONS = {"max_tokens": 24}


def changed(folder: Path, factor: float, model: str = MODEL_NAME) -> Path:
    """Write a model with other weights."""
    shutil.copytree(DATA / model, folder, ignore=shutil.ignore_patterns("golden.npz"))
    file = open_safetensors(DATA / model / "model.safetensors")
    tensors = {name: np.asarray(file.read(name)) for name in file.tensors}
    other = {name: (array * factor if "proj" in name else array).astype(array.dtype) for name, array in tensors.items()}
    write_safetensors(folder / "model.safetensors", other)
    return folder


def changed_adapter(folder: Path, source: Path, factor: float) -> Path:
    """Write an adapter with other matrices B; files that are there are overwritten."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    file = open_safetensors(source / "adapter_model.safetensors")
    tensors = {name: np.array(file.read(name)) * (factor if "lora_B" in name else 1) for name in file.tensors}
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    return folder


class AtOnce(Executor):
    """Runs work where it is submitted, so that a command takes a known number of steps."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


class Operator:
    """Gives commands to a core and keeps their ends."""

    def __init__(
        self, rig: Rig | ModelEngine, adapters: AdapterPlaces | None = None, threads: Executor | None = None
    ) -> None:
        self.core = rig.core
        self.core.control = EngineControl(
            rig.scheduler, rig.executor.weights, threads or AtOnce(), adapters=adapters, tiers=rig.core.tiers
        )
        self.ends: list[tuple[ErrorInfo | None, EngineState]] = []
        self.outputs: list[RequestOutput] = []
        """Outputs of the steps that commands took."""

    def command(self, name: CommandName, **options: object) -> None:
        command = Command(len(self.ends), name, CommandOptions(**options))  # type: ignore[arg-type]
        assert self.core.control.begin(command, lambda error, state: self.ends.append((error, state)))

    def finish(self, name: CommandName, **options: object) -> EngineState:
        """Run a command to its end, which must be a success."""
        self.command(name, **options)
        for _ in range(100):
            if not self.core.control.is_busy:
                break
            self.step()
        error, state = self.ends[-1]
        assert error is None
        return state

    def refused(self, name: CommandName, **options: object) -> str:
        """Run a command that must fail; returns the error's text."""
        self.command(name, **options)
        self.step()
        error, _ = self.ends[-1]
        assert error is not None
        return error.message

    def step(self) -> None:
        step = self.core.step()
        self.outputs += [] if step is None else step.outputs


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return changed(tmp_path_factory.mktemp("weights") / "new", -0.7)


@pytest.fixture(scope="module")
def fresh(new: Path) -> Iterator[ModelEngine]:
    """An engine that was started with the new weights."""
    engine = ModelEngine(new, max_num_seqs=16, max_num_batched_tokens=64)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def served() -> Iterator[ModelEngine]:
    engine = ModelEngine(MODEL, max_num_seqs=16, max_num_batched_tokens=64)
    yield engine
    engine.close()


@pytest.fixture
def engine(served: ModelEngine) -> Iterator[ModelEngine]:
    """An engine with the old weights and an empty cache."""
    served.restart()
    yield served
    served.executor.weights.load(str(MODEL))()  # type: ignore[union-attr]


def run(engine: ModelEngine, prompts: dict[str, list[int]], max_tokens: int = 24) -> dict[str, list[int]]:
    engine.restart()
    results = engine.run([request(name, tokens, max_tokens=max_tokens) for name, tokens in prompts.items()])
    return {name: result.token_ids for name, result in results.items()}


class Collector:
    """Runs a core step by step, and keeps each request's tokens by the version of the weights."""

    def __init__(self, engine: ModelEngine) -> None:
        self.core = engine.core
        self.generated = {name: Generated() for name in PROMPTS}
        self.tokens: dict[str, dict[int, list[int]]] = {name: {} for name in PROMPTS}
        for name, tokens in PROMPTS.items():
            assert self.core.handle(request(name, tokens)) == []

    def step(self, count: int = 1000) -> None:
        while count and (self.core.has_work or self.core.control.is_busy):
            count -= 1
            step = self.core.step()
            for output in [] if step is None else step.outputs:
                self.generated[output.request_id].add(output)
                if output.token_ids:
                    self.tokens[output.request_id].setdefault(output.weight_version, []).extend(output.token_ids)


@pytest.mark.slow
def test_kept_requests_continue_with_the_new_weights_as_a_fresh_engine_would(
    engine: ModelEngine, fresh: ModelEngine, new: Path
) -> None:
    old = run(engine, PROMPTS)
    engine.restart(max_burst_ms=0)
    operator, collector = Operator(engine), Collector(engine)
    num_compilations = engine.executor.compilations()
    collector.step(9)
    operator.command("update_weights", model=str(new))
    collector.step()
    assert engine.executor.compilations() == num_compilations
    assert operator.ends == [(None, EngineState(weight_version=1))]
    for name, versions in collector.tokens.items():
        before, after = versions[0], versions[1]
        assert 0 < len(before) < 24
        assert before == old[name][: len(before)]
        assert {name: after} == run(fresh, {name: PROMPTS[name] + before}, 24 - len(before))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_running_requests_end_before_the_update(
    engine: ModelEngine, fresh: ModelEngine, new: Path, mode: PauseMode
) -> None:
    old, other = run(engine, PROMPTS), run(fresh, {"later": PROMPTS["a"]})
    engine.restart(max_burst_ms=0)
    operator, collector = Operator(engine), Collector(engine)
    collector.step(9)
    operator.command("update_weights", model=str(new), mode=mode)
    collector.step()
    assert all(0 not in versions or 1 not in versions for versions in collector.tokens.values())
    for name, result in collector.generated.items():
        if mode == "wait":
            assert result.token_ids == old[name]
        else:
            assert result.finish_reason == "error"
    assert operator.ends == [(None, EngineState(weight_version=1))]
    [result] = engine.run([request("later", PROMPTS["a"])]).values()
    assert result.token_ids == other["later"]
    assert result.num_cached_tokens == 0, "pages of the old weights"


@pytest.mark.slow
def test_all_scores_of_a_prompt_are_those_of_the_weights_that_sample(
    engine: ModelEngine, fresh: ModelEngine, new: Path
) -> None:
    """The update comes when the old weights have scored a part of the prompt."""
    prompt = PROMPTS["a"]
    message = request("a", prompt, num_prompt_logprobs=0, num_top_logprobs=0, max_tokens=4)
    found, steps = Generated(), {"max_num_batched_tokens": 16, "max_burst_ms": 0}
    engine.restart(**steps)
    operator = Operator(engine)
    assert engine.core.handle(message) == []
    while engine.core.has_work:
        operator.step()
        if not operator.ends and any(output.prompt_logprobs for output in operator.outputs):
            operator.finish("update_weights", model=str(new))
    for output in operator.outputs:
        found.add(output)
    old = len(found.prompt_logprobs) - (len(prompt) - 1)
    assert 0 < old < len(prompt) - 1
    fresh.restart(**steps)
    expected = fresh.run([message])["a"]
    assert found.prompt_logprobs[old:] == expected.prompt_logprobs
    assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)


@pytest.mark.slow
def test_weights_that_do_not_fit_change_nothing(engine: ModelEngine, tmp_path: Path) -> None:
    old = run(engine, PROMPTS)
    operator = Operator(engine)
    for folder, text in (
        (DATA / "qwen3_tiny", "only weights of the same shapes"),
        (tmp_path / "none", "expected an existing"),
    ):
        operator.command("update_weights", model=str(folder))
        assert engine.core.step() is None
        error, state = operator.ends[-1]
        assert error is not None and text in error.message, error
        assert error.error_class == "InvalidRequestError"
        assert state.weight_version == 0
    assert run(engine, PROMPTS) == old


@pytest.mark.slow
def test_a_read_that_fails_half_way_keeps_nothing_on_the_device(
    engine: ModelEngine, new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that collects no cycles for a while would else run out of memory."""
    read, names = TensorReader.read, list[str]()

    def fail_late(self: TensorReader, name: str, *rows: range) -> Any:
        names.append(name)
        if len(names) == 12:
            raise CheckpointError("the file vanished")
        return read(self, name, *rows)

    gc.collect()
    gc.disable()
    try:
        with ThreadPoolExecutor(1) as threads:
            operator, before = Operator(engine, threads=threads), len(jax.live_arrays())
            monkeypatch.setattr(TensorReader, "read", fail_late)
            operator.command("update_weights", model=str(new))
            while engine.core.control.is_busy:
                operator.step()
        error, _ = operator.ends[-1]
        assert error is not None and "vanished" in error.message
        assert len(jax.live_arrays()) == before
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_memory_back_and_kept_requests_continue(engine: ModelEngine, level: int) -> None:
    old = run(engine, PROMPTS)
    engine.restart(max_burst_ms=0)
    operator, collector = Operator(engine), Collector(engine)
    collector.step(9)
    runner = engine.executor._runner
    before = [*runner.params, *jax.tree.leaves(runner._state.arrays.cache)]
    operator.command("sleep", sleep_level=level)
    collector.step()
    assert operator.ends == [(None, EngineState(is_paused=True, is_sleeping=True))]
    assert all(array.is_deleted() for array in before)
    [end] = engine.core.handle(request("late", [1, 2, 3]))
    assert end.error is not None and end.error.error_class == "UnavailableError"
    operator.command("resume")
    engine.core.step()
    assert operator.ends[-1][0] is not None
    operator.command("wake_up")
    engine.core.step()
    collector.step()
    assert {name: result.token_ids for name, result in collector.generated.items()} == old


@pytest.mark.slow
def test_weights_that_arrive_in_sleep_serve_after_it(engine: ModelEngine, fresh: ModelEngine, new: Path) -> None:
    operator = Operator(engine)
    operator.finish("sleep", sleep_level=2)
    assert operator.finish("update_weights", model=str(new)).is_sleeping
    assert operator.finish("wake_up") == EngineState(weight_version=1)
    results = engine.run([request(name, tokens) for name, tokens in PROMPTS.items()])
    assert {name: result.token_ids for name, result in results.items()} == run(fresh, PROMPTS)


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    file = open_safetensors(folder / "model.safetensors")
    return {name: np.asarray(file.read(name)) for name in file.tensors}


@pytest.mark.slow
def test_some_tensors_replace_those_of_their_names(
    engine: ModelEngine, fresh: ModelEngine, new: Path, tmp_path: Path
) -> None:
    """The others stay; tensors that do not fit change nothing; and none can be read again after a sleep without a copy."""
    tensors, operator = tensors_of(new), Operator(engine)
    for name, array, text in (
        ("model.layers.0.mlp.down_proj.weight", np.zeros((3, 3), np.float32), "expected by the model config"),
        ("model.layers.0.mlp.none", np.zeros(3, np.float32), "not expected"),
        ("model.norm.weight", np.ones_like(tensors["model.norm.weight"], np.int32), "bfloat16 expected, found I32"),
    ):
        write_safetensors(tmp_path / "bad", {name: array})
        assert text in operator.refused("update_weights", tensors=str(tmp_path / "bad"))
    assert "found none" in operator.refused("update_weights", tensors=str(write_safetensors(tmp_path / "bad", {})))
    changed_ones = {name: array for name, array in tensors.items() if "proj" in name}
    assert 0 < len(changed_ones) < len(tensors)
    some = write_safetensors(tmp_path / "some", changed_ones)
    assert operator.finish("update_weights", tensors=str(some)).weight_version == 1
    assert run(engine, PROMPTS) == run(fresh, PROMPTS)
    operator = Operator(engine)
    operator.finish("sleep", sleep_level=2)
    assert "cannot be read again" in operator.refused("wake_up")
    assert "all tensors" in operator.refused("update_weights", tensors=str(some))
    operator.finish("update_weights", tensors=str(write_safetensors(tmp_path / "all", tensors)))
    operator.finish("wake_up")
    assert run(engine, PROMPTS) == run(fresh, PROMPTS)


def test_tensors_that_are_served_as_one_array_come_together(tmp_path: Path) -> None:
    """The matrices of all experts of a layer are one array: a part of it cannot be replaced."""
    base = open_model(DATA / "mixtral_tiny")
    prepared = prepare(Config(model=ModelConfig(model="any", max_model_len=128)), decoder_of(base))
    leaf = next(leaf for leaf in prepared.skeleton.leaves if leaf.num_experts)
    arrays = {name: np.asarray(base.read(name)) for name in leaf.tensors}

    def loaded(names: tuple[str, ...]) -> dict[int, jax.Array]:
        file = write_safetensors(tmp_path / "file", {name: arrays[name] for name in names})
        found = open_tensors(file, base, families())
        return load_changed(found, prepared.skeleton, prepared.sharding)

    assert len(loaded(leaf.tensors)) == len(leaf.arrays)
    with pytest.raises(CheckpointError, match="are served as one array"):
        loaded(leaf.tensors[1:])


@pytest.mark.slow
def test_adapters_are_loaded_and_unloaded_while_others_run(tmp_path: Path) -> None:
    """Tokens are PEFT's, an adapter that takes another's place finds none of its pages, and nothing is compiled."""
    goldens = adapter_goldens("llama3_tiny")
    modules = {name: str(goldens[name].path) for name in ("first", "second")}
    engine = ModelEngine(DATA / "llama3_tiny", lora_modules=",".join(map("=".join, modules.items())))
    places = AdapterPlaces(modules, 2)
    operator = Operator(engine, places)

    def check(*names: str) -> None:
        numbers = {"base": 0} | {adapter.name: adapter.number for adapter in places.loaded}
        messages = [request(name, goldens[name].prompt_ids, adapter=numbers[name], max_tokens=32) for name in names]
        for name, result in engine.run(messages).items():
            assert result.token_ids == goldens[name].output_ids.tolist()
            assert (result.num_cached_tokens > 0) == (name in seen)
        seen.update(names)

    seen: set[str] = set()
    check("base", "first")
    operator.finish("unload_adapter", adapter="second")
    operator.finish("load_adapter", adapter="second", source=modules["second"])
    check("base", "first", "second")
    assert "loaded already" in operator.refused("load_adapter", adapter="first", source="any")
    assert "all 2 are taken" in operator.refused("load_adapter", adapter="third", source="any")
    assert "not loaded" in operator.refused("unload_adapter", adapter="third")
    assert engine.core.handle(request("old", goldens["first"].prompt_ids, adapter=1, max_tokens=3)) == []
    operator.finish("unload_adapter", adapter="first")
    [end] = engine.core.handle(request("late", [1, 2, 3], adapter=1))
    assert end.error is not None
    assert end.error.error_class == "ModelNotFoundError"
    assert "still use the adapter" in operator.refused("load_adapter", adapter="first", source=modules["first"])
    while engine.core.has_work:
        operator.step()
    tokens = [token for output in operator.outputs for token in output.token_ids]
    assert tokens == goldens["first"].output_ids.tolist()[:3]
    assert "existing folder" in operator.refused("load_adapter", adapter="third", source=str(tmp_path / "no"))
    operator.finish("load_adapter", adapter="first", source=modules["first"])
    assert {adapter.name: place_of(adapter.number) for adapter in places.loaded} == {"second": 2, "first": 1}
    seen.remove("first")
    check("first", "second", "base")
    operator.finish("sleep", sleep_level=2)
    operator.finish("wake_up")
    seen.clear()
    check("first", "second")
    assert engine.executor.compilations()["serving"] == 0
    engine.close()


class Adapters:
    """An engine with two places for adapters, in which they are copies of the goldens."""

    def __init__(self, folder: Path) -> None:
        self.goldens = adapter_goldens("llama3_tiny")
        self.model = DATA / "llama3_tiny"
        self.engine = ModelEngine(self.model, max_loras=2)
        self.places = AdapterPlaces({}, 2)
        self.operator = Operator(self.engine, self.places)
        self._folder = folder

    def copy(self, golden: str) -> Path:
        return changed_adapter(self._folder / golden, self.goldens[golden].path, 1.0)

    def load(self, name: str, folder: Path) -> None:
        self.operator.finish("load_adapter", adapter=name, source=str(folder))

    def request(self, name: str, golden: str) -> AddRequest:
        number = next(adapter.number for adapter in self.places.loaded if adapter.name == name)
        return request(name, self.goldens[golden].prompt_ids, adapter=number, max_tokens=32)

    def check(self, **goldens: str) -> None:
        """Generate with loaded adapters; each must have the tokens of its golden."""
        found = self.engine.run([self.request(*each) for each in goldens.items()])
        for name, golden in goldens.items():
            assert found[name].token_ids == self.goldens[golden].output_ids.tolist(), name


@pytest.fixture(scope="module")
def served_adapters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapters]:
    adapters = Adapters(tmp_path_factory.mktemp("adapters"))
    yield adapters
    adapters.engine.close()


@pytest.fixture
def adapters(served_adapters: Adapters) -> Iterator[Adapters]:
    """The engine without adapters, and with the model's weights."""
    yield served_adapters
    for adapter in served_adapters.places.loaded:
        served_adapters.operator.finish("unload_adapter", adapter=adapter.name)
    served_adapters.operator.finish("update_weights", model=str(served_adapters.model))


@pytest.mark.slow
def test_files_of_adapters_may_vanish(adapters: Adapters) -> None:
    """One adapter is loaded, and another one was unloaded while a request goes on with it."""
    operator, first, second = adapters.operator, adapters.copy("first"), adapters.copy("second")
    adapters.load("a", first)
    adapters.load("b", second)
    late = adapters.request("b", "second")
    operator.outputs.clear()
    assert adapters.engine.core.handle(late) == []
    operator.step()
    operator.finish("unload_adapter", adapter="b")
    shutil.rmtree(first)
    shutil.rmtree(second)
    operator.finish("update_weights", model=str(adapters.model))
    while adapters.engine.core.has_work:
        operator.step()
    tokens = [token for output in operator.outputs for token in output.token_ids]
    assert tokens == adapters.goldens["second"].output_ids.tolist()
    adapters.load("c", adapters.goldens["second"].path)
    adapters.check(a="first", c="second")
    operator.finish("sleep", sleep_level=2)
    operator.finish("wake_up")
    adapters.check(a="first", c="second")


@pytest.mark.slow
def test_adapters_that_were_unloaded_are_forgotten_when_no_request_uses_them(adapters: Adapters) -> None:
    weights, operator = adapters.engine.executor.weights, adapters.operator
    assert weights is not None
    adapters.load("a", adapters.copy("first"))
    assert adapters.engine.core.handle(adapters.request("a", "first")) == []
    operator.finish("unload_adapter", adapter="a")
    assert sum(map(bool, weights._adapters)) == 1
    while adapters.engine.core.has_work:
        operator.step()
    operator.finish("engine_state")
    assert not any(weights._adapters)


@pytest.mark.slow
def test_an_adapter_that_is_overwritten_stays_as_it_was_loaded(adapters: Adapters) -> None:
    operator, first = adapters.operator, adapters.copy("first")
    adapters.load("a", first)
    changed_adapter(first, adapters.goldens["first"].path, -1.0)
    adapters.load("b", adapters.goldens["second"].path)
    adapters.check(a="first", b="second")
    operator.finish("update_weights", model=str(adapters.model))
    adapters.check(a="first", b="second")
    operator.finish("sleep", sleep_level=2)
    operator.finish("wake_up")
    adapters.check(a="first", b="second")


@pytest.mark.slow
def test_adapters_are_loaded_in_sleep_beside_weights_that_came_as_tensors(adapters: Adapters) -> None:
    """Level 1 keeps its copy of the weights. After level 2 all tensors of the model suffice, without those of adapters."""
    operator, file = adapters.operator, adapters.model / "model.safetensors"
    adapters.load("a", adapters.goldens["first"].path)
    operator.finish("update_weights", tensors=str(file))
    operator.finish("sleep", sleep_level=1)
    adapters.load("b", adapters.goldens["second"].path)
    operator.finish("wake_up")
    adapters.check(a="first", b="second")
    operator.finish("sleep", sleep_level=2)
    assert "cannot be read again" in operator.refused("wake_up")
    operator.finish("update_weights", tensors=str(file))
    operator.finish("wake_up")
    adapters.check(a="first", b="second")


@pytest.mark.slow
def test_weights_are_read_again_by_the_headers_that_their_files_have_then(
    engine: ModelEngine, fresh: ModelEngine, new: Path, tmp_path: Path
) -> None:
    folder, operator = changed(tmp_path / "model", 1.0), Operator(engine)
    operator.finish("update_weights", model=str(folder))
    operator.finish("sleep", sleep_level=2)
    tensors = tensors_of(new)
    write_safetensors(folder / "model.safetensors", {name: tensors[name] for name in reversed(tensors)})
    operator.finish("wake_up")
    assert run(engine, PROMPTS) == run(fresh, PROMPTS)


def test_steps_and_heartbeats_go_on_while_weights_are_copied_for_a_sleep() -> None:
    rig, is_copied = Rig(), threading.Event()

    class SlowWeights(FakeWeights):
        def discard(self, *, keeps_copy: bool) -> Callable[[], None]:
            assert is_copied.wait(60) and keeps_copy
            return super().discard(keeps_copy=keeps_copy)

    rig.executor.weights = SlowWeights()
    message = add("a", prompt(5), max_tokens=6)
    with ThreadPoolExecutor(1) as pool:
        operator = Operator(rig, threads=pool)
        operator.command("sleep", sleep_level=1)
        rig.send(message)
        while rig.core.has_work:
            operator.step()
        rig.core.heartbeat()
        assert not operator.ends
        is_copied.set()
        while rig.core.control.is_busy:
            operator.step()
    rig.collect(operator.outputs)
    assert rig.tokens["a"] == expected(message)
    assert operator.ends == [(None, EngineState(is_paused=True, is_sleeping=True))]
    assert rig.executor.weights.installed == ["none"]


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_pause_holds_steps_until_it_ends(mode: PauseMode, depth: int) -> None:
    rig = Rig(depth=depth, max_num_seqs=2)
    messages = [add(name, prompt(9, index), max_tokens=8) for index, name in enumerate("abcd")]
    rig.send(*messages)
    operator = Operator(rig)

    def work() -> None:
        for _ in range(100):
            step = rig.core.step() if rig.core.has_work or rig.core.control.is_busy else None
            rig.collect(step.outputs if step is not None else ())

    for _ in range(3):
        step = rig.core.step()
        rig.collect(step.outputs if step is not None else ())
    operator.command("pause", mode=mode)
    work()
    assert operator.ends == [(None, EngineState(is_paused=True))]
    ended = {"keep": "", "wait": "ab", "abort": "abcd"}[mode]
    assert "".join(sorted(rig.ends)) == ended
    late = add("late", prompt(5, 50), max_tokens=3)
    rig.send(late)
    assert not rig.core.has_work
    operator.command("resume")
    work()
    assert operator.ends[-1] == (None, EngineState())
    assert sorted(rig.ends) == ["a", "b", "c", "d", "late"]
    for message in (*messages, late):
        is_whole = mode != "abort" or message is late
        assert not is_whole or rig.tokens[message.request_id] == expected(message)
    assert rig.kv.usage == 0.0


def test_a_later_command_waits_for_the_first() -> None:
    rig = Rig()
    rig.send(add("a", prompt(5), max_tokens=6))
    operator = Operator(rig)
    assert rig.core.step() is not None
    operator.command("update_weights", model="one", mode="wait")
    operator.command("update_weights", model="two")
    operator.command("engine_state")
    while rig.core.has_work or rig.core.control.is_busy:
        step = rig.core.step()
        rig.collect(step.outputs if step is not None else ())
    assert rig.executor.weights.installed == ["one", "two"]
    assert [state.weight_version for _, state in operator.ends] == [1, 2, 2]
    assert {output.weight_version for output in rig.ends.values()} == {0}


def test_an_executor_whose_weights_cannot_change_says_so() -> None:
    rig = Rig()
    rig.executor.weights = None  # type: ignore[assignment]
    operator = Operator(rig)
    names: tuple[CommandName, ...] = ("update_weights", "sleep")
    for name in names:
        operator.command(name)
        rig.core.step()
        error, _ = operator.ends[-1]
        assert error is not None and "cannot change" in error.message


def test_an_engine_that_embeds_loads_no_adapter_while_texts_wait() -> None:
    texts = EmbedScheduler(SchedulerConfig(), Buckets((), (8,), 4), 8, 100)
    assert texts.add(AddRequest(RequestId("text"), [1, 2, 3], EngineSamplingParams())) is None
    control, errors = EngineControl(texts, None, AtOnce()), list[ErrorInfo | None]()
    options = CommandOptions(adapter="a", source="b")
    assert control.begin(Command(0, "load_adapter", options), lambda error, state: errors.append(error))
    control.poll(0)
    assert errors[0] is not None and "it embeds" in errors[0].message
