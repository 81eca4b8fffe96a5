"""Failures of the compiling process, and the descriptions of devices for compilers."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import msgspec
import pytest

from jaxserve.config import Config, ModelConfig
from jaxserve.errors import StartupError
from jaxserve.layers.cache import pool_shapes
from jaxserve.model_config.checkpoint_quantization import CheckpointQuantization
from jaxserve.runner.compiler_options import compiler_options
from jaxserve.runner.inputs import programs
from jaxserve.runner.program_cache import ProgramCache
from jaxserve.scheduler.plan import Buckets
from jaxserve.tools.planning import compile_process
from jaxserve.tools.planning.compiler import CompileJob, compile_programs
from jaxserve.tools.planning.devices import ACCELERATORS, NAMES, find_device
from jaxserve.tools.planning.planner import read_model
from jaxserve.tools.planning.targets import cuda_target_config, missing_compiler
from tests.unit.tools.planning.configs import TINY, write_config


def small_job(folder: Path) -> CompileJob:
    path = write_config(folder, TINY)
    return CompileJob(
        config=Config(model=ModelConfig(model=str(path))),
        device=find_device("cpu", 1 << 30),
        decoder=read_model(path).decoder,
        shapes=pool_shapes((2, 8, 2, 16, 8), "float32"),
        programs=programs(Buckets(decode=(1,), mixed=(16,), max_num_seqs=1, max_decode_steps=1), 8),
    )


@pytest.mark.parametrize(
    "stored",
    [
        None,
        CheckpointQuantization("none", note="dequantised"),
        CheckpointQuantization("int4-weight-only", ("lm_head",), 32, has_offsets=True),
    ],
)
def test_a_job_survives_the_trip_whatever_the_checkpoint_is_stored_in(
    tmp_path: Path, stored: CheckpointQuantization | None
) -> None:
    job = small_job(tmp_path)
    job = msgspec.structs.replace(job, decoder=replace(job.decoder, stored=stored))
    assert pickle.loads(pickle.dumps(job)) == job


def test_a_compiling_process_that_dies_is_one_line(tmp_path: Path) -> None:
    job = small_job(tmp_path)
    reported: list[tuple[int, int, str]] = []
    with pytest.raises(StartupError, match=r"the compiler for this machine's CPU.* died: .*No module named gone"):
        compile_programs(job, os.environ, lambda *progress: reported.append(progress), module="gone")
    assert reported == [(0, 2, "")]


def test_a_full_temporary_folder_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.TemporaryFile", partial(open, "/dev/full", "w+b"))
    with pytest.raises(StartupError, match="cannot be run: No space left on device"):
        compile_programs(small_job(tmp_path), os.environ, lambda *progress: None)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "cpu"])
def test_every_accelerator_is_described_in_full(name: str) -> None:
    device = ACCELERATORS[name]
    assert device.rates is not None
    assert device.rates.source.startswith("published spec: ")
    assert device.rates.float32_flops < device.rates.bfloat16_flops <= device.rates.int8_ops
    assert device.limit_bytes <= device.memory_bytes
    if device.platform == "gpu":
        text = cuda_target_config(device)
        assert f"device_memory_size: {device.memory_bytes}" in text
        assert ("ACCELERATED_FEATURES" in text) == (device.cuda is not None and device.cuda.capability >= (9, 0))
    else:
        assert device.topologies


def test_larger_slices_than_are_described_are_not_compiled_for() -> None:
    assert missing_compiler(find_device("cpu"), 4) is None
    missing = missing_compiler(ACCELERATORS["v5p"], 128)
    assert missing in ("libtpu is not installed", "no topology of 128 devices is known here: at most 64")


class FullCompiler:
    """A program whose compilation is refused, and the options that it was asked with."""

    def __init__(self) -> None:
        self.options: list[object] = []

    def compile(self, options: object = None) -> None:
        self.options.append(options)
        raise jax.errors.JaxRuntimeError("no room")


def test_programs_are_compiled_with_the_servers_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lowered = FullCompiler()
    monkeypatch.setattr(compile_process, "lower", lambda *_: lowered)
    monkeypatch.setattr(compile_process, "described_devices", lambda *_: jax.devices()[:1])
    job = small_job(tmp_path)
    for device in (job.device, ACCELERATORS["h100"]):
        program = compile_process.compile_program(msgspec.structs.replace(job, device=device), job.programs[0])
        assert program == "no room"
    assert lowered.options == [None, compiler_options("gpu", ProgramCache(None))]
