"""Images and the steps that compute them: chunks that end inside an image, aborted requests, encoder calls that fail, adapters and
two devices."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.config import ImagesConfig
from jaxserve.executor import preparation
from jaxserve.ipc.messages import Abort, AddRequest, RequestOutput
from jaxserve.runner.inputs import Program
from jaxserve.runner.warmup import make_programs
from jaxserve.scheduler.plan import NO_IMAGE_ROW, StepPlan
from tests.engine.image_reader import ORDER, Reader
from tests.engine.model_engine import ModelEngine, request
from tests.models.goldens import DATA

NAME = "qwen3_vl_tiny"
STEP_PATCHES = 30
"""Patches that are encoded before a step beside a reply; a golden's pictures have 24 and 32."""
PARTS = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7), (7, 8), (8, 9), (9, 10)]
"""Parts of a call, each of which is one call of a program, as they are more work than a step of this decoder may have: start, heads and
tile of three layers, features of two and end."""
TEXT = request("text", list(range(20, 60)))

pytestmark = [pytest.mark.slow]


class Saboteur:
    """Runs executables, but for encoder calls whose input holds the bytes `poison`, and for one tile of a layer."""

    def __init__(self) -> None:
        self.poison: bytes | None = None
        self.num_good_tiles: int | None = None
        """Tiles that run before one fails; None: none fails."""
        self.num_failures = 0

    def make_programs(self, *arguments: Any, **options: Any) -> dict[Any, Any]:
        made = make_programs(*arguments, **options)
        return {
            program: dataclasses.replace(result, compiled=self._wrapped(program, result.compiled))  # type: ignore[arg-type]
            if program.kind.startswith("encode")
            else result
            for program, result in made.items()
        }

    def _wrapped(self, program: Program, compiled: jax.stages.Compiled) -> Callable[..., Any]:
        def call(params: Any, state: Any, packed: np.ndarray) -> Any:
            if self.poison is not None and self.poison in packed.tobytes():
                self._fail()
            if program.kind == "encode_tile" and self.num_good_tiles is not None:
                self.num_good_tiles = self.num_good_tiles - 1 if self.num_good_tiles else None
                if self.num_good_tiles is None:
                    self._fail()
            return compiled(params, state, packed)

        return call

    def _fail(self) -> None:
        self.num_failures += 1
        raise RuntimeError("lost on the way")


@dataclasses.dataclass
class Bench:
    """A reader whose encoder calls may fail, and the tokens of a text."""

    reader: Reader
    saboteur: Saboteur
    text: list[int]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    saboteur = Saboteur()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "make_programs", saboteur.make_programs)
        images = ImagesConfig(max_encode_patches=STEP_PATCHES)
        engine = ModelEngine(DATA / "vision" / NAME, max_model_len=256, images=images)
    yield Bench(Reader(engine, NAME), saboteur, engine.run([TEXT])["text"].token_ids)
    engine.close()


def plans_of(engine: ModelEngine) -> list[StepPlan]:
    """Return a list that collects the engine's plans from now on."""
    found: list[StepPlan] = []
    schedule = engine.scheduler.schedule

    def watched() -> StepPlan | None:
        plan = schedule()
        found.extend([] if plan is None else [plan])
        return plan

    engine.scheduler.schedule = watched  # type: ignore[method-assign]
    return found


def finish(engine: ModelEngine) -> list[RequestOutput]:
    """Run until no request is left; returns all outputs."""
    outputs: list[RequestOutput] = []
    while engine.core.has_work:
        step = engine.core.step()
        outputs += [] if step is None else step.outputs
    return outputs


def begin_reply(engine: ModelEngine, message: AddRequest) -> list[RequestOutput]:
    """Run until a request has its first token; returns all outputs."""
    outputs = [*engine.core.handle(message)]
    while not outputs:
        step = engine.core.step()
        outputs += [] if step is None else step.outputs
    return outputs


def joined(outputs: list[RequestOutput]) -> dict[str, list[int]]:
    """Return the tokens by request, each of which has exactly one terminal output: its last one."""
    tokens: dict[str, list[int]] = {}
    ends: Counter[str] = Counter()
    for output in outputs:
        assert not ends[output.request_id], "an output after the terminal one"
        tokens.setdefault(output.request_id, []).extend(output.token_ids)
        ends[output.request_id] += output.finish_reason is not None
    assert ends == dict.fromkeys(tokens, 1)
    return tokens


def test_chunks_that_end_inside_an_image_change_no_token(bench: Bench) -> None:
    engine, reader = bench.reader.engine, bench.reader
    engine.restart(max_num_batched_tokens=3)
    plans = plans_of(engine)
    assert engine.run([reader.request("a", 3)])["a"].token_ids == reader.expected(3)
    ends_inside = [
        before.image_rows is not None
        and after.image_rows is not None
        and before.image_rows[-1] != NO_IMAGE_ROW
        and after.image_rows[0] != NO_IMAGE_ROW
        and not after.encode_items
        for before, after in itertools.pairwise(plans)
    ]
    assert any(ends_inside)
    assert sum(len(plan.encode_items) for plan in plans) == 3


def test_a_reply_gets_a_token_from_every_step_and_waits_for_few_patches(bench: Bench) -> None:
    engine, reader = bench.reader.engine, bench.reader
    engine.restart(overlap=False)
    reply = request("reply", [30, 31], max_tokens=200)
    outputs = begin_reply(engine, reply)
    plans = plans_of(engine)
    messages = [reader.request("one", 1), reader.request("three", 3, changed=True), reader.request("other", 3)]
    for message in messages:
        outputs += engine.core.handle(message)
    outputs += finish(engine)
    is_beside = [reply.request_id in plan.request_ids for plan in plans]
    assert all(is_beside[: sum(is_beside)])
    beside = plans[: sum(is_beside)]
    calls = [plan.encode_items for plan in beside if plan.encode_items]
    assert [{item.units for item in items} for items in calls] == [{part} for part in PARTS] * 6
    for plan in beside:
        num_patches = [len(item.patches) for item in plan.encode_items]
        assert len(num_patches) <= 1 or sum(num_patches) <= STEP_PATCHES
        assert not num_patches or (plan.kind == "decode" and plan.num_steps == 1)
    assert sum(len(plan.encode_items) for plan in plans) == 6 * len(PARTS)  # six different pictures
    tokens = joined(outputs)
    assert (tokens["one"], tokens["other"]) == (reader.expected(1), reader.expected(3))


@pytest.mark.parametrize("num_steps", range(7))
def test_an_aborted_request_leaves_no_rows_and_changes_no_other(bench: Bench, num_steps: int) -> None:
    engine, reader = bench.reader.engine, bench.reader
    engine.restart(max_num_batched_tokens=9)
    outputs: list[RequestOutput] = []
    for message in (reader.request("a", 3), TEXT, reader.request("same", 3)):
        outputs += engine.core.handle(message)
    for _ in range(num_steps):
        step = engine.core.step()
        outputs += [] if step is None else step.outputs
    outputs += engine.core.handle(Abort([reader.request("a", 3).request_id]))
    outputs += finish(engine)
    tokens = joined(outputs)
    assert (tokens["text"], tokens["same"]) == (bench.text, reader.expected(3))
    assert [output.finish_reason for output in outputs if output.request_id == "a"][-1] == "abort"
    assert engine.scheduler.take_stats().image_cache_usage_perc == 0
    assert engine.run([reader.request("again", 1)])["again"].token_ids == reader.expected(1)


@pytest.mark.parametrize("has_other", [False, True])
@pytest.mark.parametrize(
    "num_parts", [1, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in range(2, len(PARTS))), len(PARTS)]
)
def test_a_request_that_is_aborted_between_two_parts_leaves_no_rows(
    bench: Bench, num_parts: int, has_other: bool
) -> None:
    engine, reader = bench.reader.engine, bench.reader
    engine.restart()
    outputs, plans = begin_reply(engine, TEXT), plans_of(engine)
    messages = [reader.request("a", 1), reader.request("same", 1)][: 1 + has_other]
    for message in messages:
        outputs += engine.core.handle(message)
    while sum(bool(plan.encode_items) for plan in plans) < num_parts:
        step = engine.core.step()
        outputs += [] if step is None else step.outputs
    outputs += engine.core.handle(Abort([messages[0].request_id]))
    assert has_other or engine.scheduler.take_stats().image_cache_usage_perc == 0
    tokens = joined(outputs + finish(engine))
    assert tokens["text"] == bench.text
    assert not has_other or tokens["same"] == reader.expected(1)
    units = [plan.encode_items[0].units for plan in plans if plan.encode_items]
    # The other request gets its first tokens after the abort, and finds what was encoded to the end.
    assert units == PARTS[:num_parts] + PARTS * (has_other and num_parts < len(PARTS))
    assert engine.scheduler.take_stats().image_cache_usage_perc == 0


def test_an_encoder_call_that_fails_ends_its_own_requests_only(bench: Bench) -> None:
    engine, reader, saboteur = bench.reader.engine, bench.reader, bench.saboteur
    engine.restart()
    bad = reader.request("bad", 1, changed=True)
    saboteur.poison = bad.images[0].patches[:192]
    outputs: list[RequestOutput] = []
    for message in (reader.request("one", 1), TEXT, bad, reader.request("three", 3)):
        outputs += engine.core.handle(message)
    outputs += finish(engine)
    saboteur.poison = None
    tokens = joined(outputs)
    assert tokens == {"one": reader.expected(1), "text": bench.text, "three": reader.expected(3), "bad": []}
    (failed,) = [output for output in outputs if output.error is not None]
    assert (failed.request_id, failed.finish_reason) == ("bad", "error") and saboteur.num_failures >= 2
    assert engine.scheduler.take_stats().image_cache_usage_perc == 0
    assert engine.run([bad])["bad"].finish_reason == "length"  # it was the call that failed, not the image


@pytest.mark.parametrize("num_good_tiles", [0, 1, 2])
def test_a_part_that_fails_once_changes_no_token(bench: Bench, num_good_tiles: int) -> None:
    engine, reader, saboteur = bench.reader.engine, bench.reader, bench.saboteur
    engine.restart()
    failures, outputs = saboteur.num_failures, begin_reply(engine, TEXT)
    saboteur.num_good_tiles = num_good_tiles
    for message in (reader.request("one", 1), reader.request("same", 1)):
        outputs += engine.core.handle(message)
    tokens = joined(outputs + finish(engine))
    assert saboteur.num_failures == failures + 1
    assert tokens == {"text": bench.text, "one": reader.expected(1), "same": reader.expected(1)}
    assert engine.scheduler.take_stats().image_cache_usage_perc == 0


@pytest.mark.parametrize("num_parts", [1, len(PARTS)])
def test_images_are_encoded_again_after_sleep_and_after_an_update_of_the_weights(bench: Bench, num_parts: int) -> None:
    engine, reader = bench.reader.engine, bench.reader
    engine.restart(overlap=False)
    weights = engine.executor.weights
    assert weights is not None
    outputs = begin_reply(engine, request("reply", [30, 31], max_tokens=60))
    plans = plans_of(engine)
    outputs += engine.core.handle(reader.request("one", 1))
    while sum(bool(plan.encode_items) for plan in plans) < num_parts:
        step = engine.core.step()
        outputs += [] if step is None else step.outputs
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    weights.discard(keeps_copy=True)()
    weights.restore()()
    del plans[:]
    tokens = joined(outputs + finish(engine))
    assert tokens["one"] == reader.expected(1)
    assert [items[0].units for plan in plans if (items := plan.encode_items)] in (PARTS, [None])


RANK, ALPHA = 4, 8


def write_adapter(folder: Path, merged: Path) -> None:
    """Write a random adapter of the text model's matrices, and the checkpoint whose weights have it added."""
    weights = load_file(DATA / "vision" / NAME / "model.safetensors")
    added, random = {}, np.random.RandomState(0)
    for name in [each for each in weights if each.endswith(("q_proj.weight", "o_proj.weight", "up_proj.weight"))]:
        weight = weights[name]
        down, up = (
            random.normal(0, 0.3, shape).astype(np.float32) for shape in ((RANK, weight.shape[1]), (len(weight), RANK))
        )
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        added |= {f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up}
        weights[name] = weight.astype(np.float32) + ALPHA / RANK * up @ down
    folder.mkdir()
    save_file(added, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj", "o_proj", "up_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    shutil.copytree(DATA / "vision" / NAME, merged)
    save_file(weights, merged / "model.safetensors")


@pytest.mark.exhaustive
def test_adapters_on_two_devices_read_images_as_merged_weights_do(tmp_path: Path) -> None:
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    write_adapter(adapter, merged)
    plain = Reader(ModelEngine(merged, max_model_len=256), NAME)
    expected = {count: plain.engine.run([plain.request("a", count)])["a"].token_ids for count in ORDER}
    plain.engine.close()
    assert all(expected[count] != plain.expected(count) for count in ORDER)
    reader = Reader(
        ModelEngine(DATA / "vision" / NAME, max_model_len=256, tensor_parallel_size=2, lora_modules=f"x={adapter}"),
        NAME,
    )
    messages = [reader.request(f"{count}-{number}", count, adapter=number) for count in ORDER for number in (0, 1)]
    found = reader.engine.run(messages)
    reader.engine.close()
    for count in ORDER:
        assert found[f"{count}-0"].token_ids == reader.expected(count)
        assert found[f"{count}-1"].token_ids == expected[count]
