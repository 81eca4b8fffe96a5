"""Kernels are tested before their first use, and the server starts however the self-test ends."""

from __future__ import annotations

import logging
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jaxserve_kernels.backend import NATIVE
from jaxserve_kernels.native.build import BuildError, build
from jaxserve_kernels.paged_attention import api

from jaxserve.config import CacheConfig, CompileConfig, Config, ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.executor.self_test import check
from jaxserve.executor.self_test.check import run_self_test, with_tested_kernels
from jaxserve.executor.self_test.comparison import (
    _STEPS,
    TOLERANCE,
    Difference,
    _plan,
    _programs,
    difference,
    num_pages,
    one_of_each_kind,
    random_params,
)
from jaxserve.executor.self_test.process import SelfTestReport, SelfTestSpec
from jaxserve.ipc.report import PhaseClock
from jaxserve.model_config.decoder import LayerConfig
from jaxserve.model_config.recurrent import LightningConfig
from jaxserve.models.registry import decoder_of, open_model
from jaxserve.models.skeleton import make_skeleton
from jaxserve.runner.backend import Chip, chip_of
from jaxserve.runner.limits import make_policy
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape
from tests.models.goldens import golden_checkpoint

MODEL = "mistral_sliding_tiny"
REFERENCE = '{"kind": "reference", "device": "H200"}'


@pytest.fixture
def config(tmp_path: Path) -> Config:
    compiling = CompileConfig(compile_cache=str(tmp_path / "cache"))
    return Config(model=ModelConfig(model="any"), compile=compiling)


@pytest.fixture(scope="module")
def spec() -> SelfTestSpec:
    return SelfTestSpec(Config(model=ModelConfig(model="any")), decoder_of(open_model(golden_checkpoint(MODEL).path)))


def says(*lines: str, then: str = "") -> list[str]:
    """Return the command of a process that prints these lines."""
    return [sys.executable, "-c", f"import os, sys, time; print({chr(10).join(lines)!r}, flush=True); {then}"]


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (says(REFERENCE, '{"kind": "verdict", "device": "H200", "difference": 0.01}'), None),
        (says('{"kind": "nothing", "device": "A100"}'), None),
        (says(REFERENCE, '{"kind": "verdict", "device": "H200", "error": "wrong"}'), "wrong"),
        (says(REFERENCE, then=f"os.kill(os.getpid(), {signal.SIGKILL})"), "their self-test was ended by signal 9"),
        (says(REFERENCE, then="sys.exit(3)"), "their self-test ended with code 3"),
        pytest.param(
            says(REFERENCE, then="time.sleep(600)"), "their self-test gave no answer in 5 s", marks=pytest.mark.slow
        ),
    ],
)
def test_a_self_test_ends_in_a_verdict_however_its_process_ends(
    spec: SelfTestSpec, command: list[str], error: str | None
) -> None:
    report = run_self_test(spec, command, timeout_s=5 if "sleep" in command[-1] else 60)
    assert report is not None
    assert report.error == error


def test_a_self_test_that_never_called_a_kernel_decides_nothing(
    spec: SelfTestSpec, caplog: pytest.LogCaptureFixture
) -> None:
    assert run_self_test(spec, [sys.executable, "-c", "raise SystemExit('no memory left')"]) is None
    assert "kernels are used untested, their self-test ended with code 1: no memory left" in caplog.text


def test_a_full_temporary_folder_leaves_kernels_untested(
    spec: SelfTestSpec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.TemporaryFile", partial(open, "/dev/full", "w+b"))
    assert run_self_test(spec) is None
    assert "kernels are used untested, their self-test cannot be run: No space left on device" in caplog.text


@pytest.mark.slow
def test_the_process_reports_that_a_cpu_has_nothing_to_test(spec: SelfTestSpec) -> None:
    assert run_self_test(spec) == SelfTestReport("nothing", "cpu")


def test_layers_that_take_what_others_have_are_tested_with_one_of_each_kind() -> None:
    own, windowed = LayerConfig(), LayerConfig(sliding_window=8)
    layers = (own, windowed, own, replace(own, index_source=2), windowed, replace(windowed, kv_source=4))
    decays = (replace(own, recurrent=LightningConfig(2, 8, decay_scale=scale)) for scale in (0.2, 1.0, 0.4))
    assert one_of_each_kind((own, *decays)) == (own, replace(own, recurrent=LightningConfig(2, 8, decay_scale=1.0)))
    found = one_of_each_kind((*layers, *(replace(own, index_source=0), replace(windowed, kv_source=1)) * 2))
    assert found == (own, windowed, replace(own, index_source=0), replace(windowed, kv_source=1))


def test_numbers_of_experts_are_those_that_there_are() -> None:
    decoder = decoder_of(open_model(golden_checkpoint("deepseek_v4_tiny").path))
    skeleton = make_skeleton(decoder, make_policy(Config(model=ModelConfig(model="any")), decoder, Chip("cpu", None)))
    assert decoder.experts is not None
    found = [np.asarray(array) for array in random_params(skeleton, make_sharding(decoder, MeshShape()))]
    [table] = [array for array in found if np.issubdtype(array.dtype, np.integer)]
    assert {*table.ravel()} == {*range(decoder.experts.num_experts)}
    assert all(len({*row}) == len(row) for row in table)


class Asked:
    """Replaces the process."""

    def __init__(self, report: SelfTestReport | None) -> None:
        self.report = report
        self.times = 0

    def __call__(self, spec: SelfTestSpec) -> SelfTestReport | None:
        self.times += 1
        return self.report


def start(config: Config, report: SelfTestReport | None, monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """Return the attention backend of a start on an accelerator, and how often the process was started."""
    asked = Asked(report)
    monkeypatch.setattr(check, "run_self_test", asked)
    monkeypatch.setattr(check, "_has_accelerator", lambda: True)
    decoder = decoder_of(open_model(golden_checkpoint(MODEL).path))
    chosen = with_tested_kernels(config, decoder, PhaseClock(), lambda *_: None)
    return chosen.compile.attention_backend, asked.times


GOOD = SelfTestReport("verdict", "H200", difference=0.01)
BAD = SelfTestReport("verdict", "H200", error="they are wrong")


def test_kernels_that_passed_are_not_tested_again(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(config, GOOD, monkeypatch) == ("auto", 1)
    assert start(config, BAD, monkeypatch) == ("auto", 0)
    other = replace(config, model=replace(config.model, quantization="int8"))
    assert start(other, SelfTestReport("nothing", "cpu"), monkeypatch) == (
        "auto",
        1,
    )  # for once there was no accelerator
    assert start(other, GOOD, monkeypatch) == ("auto", 1)
    longer = replace(config, model=replace(config.model, max_model_len=128))
    wider = replace(config, scheduler=replace(config.scheduler, max_num_seqs=3))
    assert [start(each, GOOD, monkeypatch)[1] for each in (longer, wider, longer)] == [1, 1, 0], "other kernels"


def test_kernels_that_fail_are_left_out_with_one_line_and_tested_again(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert start(config, BAD, monkeypatch) == ("reference", 1)
    assert caplog.messages == ["H200: kernels fail here, attention is left to XLA: they are wrong"]
    assert start(config, BAD, monkeypatch) == ("reference", 1)
    assert start(config, None, monkeypatch) == ("auto", 1)  # no verdict
    assert start(config, GOOD, monkeypatch) == ("auto", 1)


@pytest.mark.parametrize(
    "settings", [{"attention_backend": "reference"}, {"try_kernels": False}], ids=lambda settings: next(iter(settings))
)
def test_no_self_test_runs_when_kernels_are_off_or_trusted(
    config: Config, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(config, compile=replace(config.compile, **settings))
    assert start(config, BAD, monkeypatch) == (config.compile.attention_backend, 0)


def test_kernels_that_were_asked_for_and_fail_are_an_error(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(config, compile=replace(config.compile, attention_backend="pallas"))
    with pytest.raises(
        ConfigError, match="--attention-backend pallas: its kernels fail here: they are wrong; use auto"
    ):
        start(config, BAD, monkeypatch)


def test_nan_is_a_error() -> None:
    assert Difference(float("nan")).error is not None
    assert Difference(TOLERANCE).error is None


@pytest.mark.parametrize("page_size", [16, 64, 96, 1008, 1024])
def test_every_token_of_a_self_test_has_a_page(spec: SelfTestSpec, page_size: int) -> None:
    """Padding writes to the null page: a row that had it would differ between right kernels."""
    config, decoder = replace(spec.config, cache=CacheConfig(block_size=page_size)), spec.decoder
    for program in _programs(config, decoder, page_size, "tpu"):
        for rows in _STEPS[program.kind]:
            plan = _plan(program, rows, num_pages(page_size), decoder.vocab_size)
            last = plan.num_computed_tokens + plan.num_scheduled_tokens - 1
            used = np.arange(program.max_pages) <= last[:, None] // page_size
            tables = plan.block_tables.reshape(len(last), program.num_tables, program.max_pages)
            assert (used.sum(1) == last // page_size + 1).all()
            assert (tables > 0)[np.broadcast_to(used[:, None], tables.shape)].all()


@pytest.mark.slow
def test_right_kernels_pass_and_one_page_too_few_does_not(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked with the native kernels for CPUs, since those of accelerators do not run here."""
    try:
        build()
    except BuildError as error:
        pytest.skip(f"native kernels: {error}")
    decoder, chip = decoder_of(open_model(golden_checkpoint(MODEL).path)), chip_of(jax.devices()[0])
    model = replace(decoder, layers=tuple(dict.fromkeys(decoder.layers)))
    policy = make_policy(config, model, chip)
    assert policy.backend in NATIVE
    stages: list[str] = []
    assert difference(config, model, chip, policy, lambda: stages.append("reference")).error is None
    assert stages == ["reference"]
    whole = api.cpu.write_and_attend

    def cut(*arguments: Any, **options: Any) -> Any:
        q, k, v, k_pages, v_pages, layer, tables, *where = arguments
        return whole(q, k, v, k_pages, v_pages, layer, tables.at[2, 1].set(0), *where, **options)

    monkeypatch.setattr(api.cpu, "write_and_attend", cut)
    error = difference(config, model, chip, policy, lambda: None).error
    assert error is not None
    assert error.startswith("a token's vector differs from XLA's by ")
