"""A step that fails on the device, in an engine with a real (tiny) model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.executor import preparation
from jaxserve.runner.warmup import make_programs
from tests.engine.model_engine import ModelEngine, request
from tests.models.goldens import golden_checkpoint


class Saboteur:
    """Runs executables, and drops their results on request."""

    def __init__(self) -> None:
        self.is_armed = False

    def make_programs(self, *arguments: Any, **options: Any) -> dict[Any, Any]:
        made = make_programs(*arguments, **options)
        return {
            program: dataclasses.replace(result, compiled=self._wrapped(result.compiled))  # type: ignore[arg-type]
            for program, result in made.items()
        }

    def _wrapped(self, compiled: jax.stages.Compiled) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            results = compiled(*arguments)
            if self.is_armed:
                self.is_armed = False
                raise RuntimeError("lost on the way")
            return results

        return call


@pytest.mark.slow
@pytest.mark.versions
def test_requests_of_a_failed_step_get_the_same_tokens_without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    saboteur = Saboteur()
    monkeypatch.setattr(preparation, "make_programs", saboteur.make_programs)
    golden = golden_checkpoint("llama2_tiny")
    engine = ModelEngine(golden.path, max_num_seqs=2, max_num_batched_tokens=16)
    mix = [request("a", golden.prompt_ids, max_tokens=64), request("b", np.array([9, 8, 7]), max_tokens=30)]
    expected = {name: result.token_ids for name, result in engine.run(mix).items()}
    assert expected["a"] == golden.output_ids.tolist()

    waiting = request("waiting", golden.prompt_ids, max_tokens=64)
    for item in (*mix, waiting):
        assert engine.core.handle(item) == []
    tokens: dict[str, list[int]] = {}
    num_steps = 0
    while engine.core.has_work:
        saboteur.is_armed = num_steps == 10
        step = engine.core.step()
        num_steps += 1
        for output in [] if step is None else step.outputs:
            assert output.error is None
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    assert not saboteur.is_armed
    assert tokens == expected | {"waiting": expected["a"]}
    assert {name: result.token_ids for name, result in engine.run(mix).items()} == expected
    assert engine.executor.compilations()["serving"] == 0
    engine.close()
