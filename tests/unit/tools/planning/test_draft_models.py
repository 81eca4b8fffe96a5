"""Plans of engines with a draft model or an MTP layer: its weights, its keys and its programs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxserve.checkpoint.safetensors_file import open_safetensors
from jaxserve.config import Config, ModelConfig, ParallelConfig, SchedulerConfig
from jaxserve.errors import ConfigError
from jaxserve.tools.planning.compile_process import compile_program
from jaxserve.tools.planning.compiler import Answers, CompileJob, ProgramMemory
from jaxserve.tools.planning.devices import ACCELERATORS, find_device
from jaxserve.tools.planning.machine import Machine, with_sizes
from jaxserve.tools.planning.planner import Planner, read_model
from tests.engine.quick_sampler import quick_programs
from tests.models.dflash_drafter import write_dflash
from tests.models.eagle_head import write_head
from tests.models.goldens import assistant_golden, golden_checkpoint
from tests.unit.tools.planning.configs import GLM_4_5_AIR, LLAMA_8B, SMOLLM2, write_config

pytestmark = pytest.mark.slow

H200 = ACCELERATORS["h200"]
DRAFT_LAYERS = 5
"""Layers of the draft model, which has the widths of SmolLM2: they are traced one by one."""
DRAFT_PARAMETERS = 49_152 * 576 + 576 + DRAFT_LAYERS * 3_540_096


@pytest.fixture
def config(tmp_path: Path) -> Config:
    paths = []
    for name, shapes in (("model", LLAMA_8B), ("draft", SMOLLM2 | {"num_hidden_layers": DRAFT_LAYERS})):
        (tmp_path / name).mkdir()
        paths.append(write_config(tmp_path / name, shapes))
    scheduler = SchedulerConfig(speculative_model=str(paths[1]), num_speculative_tokens=3)
    return Config(model=ModelConfig(model=str(paths[0])), scheduler=scheduler)


def planner(config: Config, **options: Any) -> Planner:
    return Planner(read_model(Path(config.model.model)), H200, H200.rates, **options)


def test_weights_and_keys_of_the_draft_model_are_counted(config: Config) -> None:
    plan = planner(config).plan(config, None)
    alone = planner(config).plan(replace(config, scheduler=SchedulerConfig()), None)
    assert plan.fits and plan.memory is not None and plan.cache is not None
    assert alone.memory is not None and alone.cache is not None
    assert plan.memory.draft_bytes == 2 * DRAFT_PARAMETERS
    assert alone.memory.draft_bytes == 0
    assert plan.memory.weights_bytes == alone.memory.weights_bytes
    assert plan.cache.bytes_per_token == alone.cache.bytes_per_token + 2 * DRAFT_LAYERS * 3 * 64 * 2
    assert plan.cache.num_tokens < alone.cache.num_tokens
    parts = plan.memory
    held = parts.weights_bytes + parts.draft_bytes + parts.kv_bytes + parts.workspace_bytes
    assert parts.free_bytes == parts.limit_bytes - held
    assert any("draft model" in note for note in plan.notes)


def test_speculative_programs_are_compiled_with_the_draft_models_cache(config: Config) -> None:
    jobs: list[CompileJob] = []

    def compiled(job: CompileJob) -> Answers:
        jobs.append(job)
        return {program.name: ProgramMemory(program.name, 1, 2, 2, 3, 4, 8) for program in job.programs}

    assert planner(config).plan(config, compiled).fits
    assert [program.kind for program in jobs[0].programs].count("speculate") == 1
    assert len(jobs[0].shapes) == 2


def test_a_draft_model_that_does_not_fit_is_named(config: Config) -> None:
    big = replace(
        config,
        scheduler=replace(config.scheduler, speculative_model=config.model.model),
    )
    write_config(Path(config.model.model), LLAMA_8B | {"num_hidden_layers": 6})
    device = ACCELERATORS["a100"]
    small = replace(device, memory_bytes=8 << 30)
    plan = Planner(read_model(Path(config.model.model)), small, device.rates).plan(big, None)
    assert not plan.fits
    assert plan.reason is not None and "those of the draft model" in plan.reason
    assert any("--tensor-parallel-size 2" in advice.change for advice in plan.advice)


def test_all_devices_of_a_machine_share_the_layers_of_both_models_if_they_can(config: Config) -> None:
    decoder = read_model(Path(config.model.model)).decoder
    machine = Machine(device=H200, num_devices=8)
    assert with_sizes(config, decoder, machine).parallel == ParallelConfig(), "9 heads do not divide"
    several = replace(config, parallel=ParallelConfig(tensor_parallel_size=2))
    with pytest.raises(ConfigError, match="not with --tensor-parallel-size 2: heads, kv_heads cannot be divided"):
        planner(several).plan(several, None)
    write_config(Path(config.model.model), LLAMA_8B | {"num_hidden_layers": 6})
    decoder = read_model(Path(config.model.model)).decoder
    itself = replace(config, scheduler=replace(config.scheduler, speculative_model=config.model.model))
    shared = with_sizes(itself, decoder, machine)
    assert shared.parallel == ParallelConfig(tensor_parallel_size=8)
    plan = planner(shared).plan(shared, None)
    assert plan.memory is not None
    assert plan.memory.draft_bytes == plan.memory.weights_bytes < 3 << 30


def test_an_mtp_layer_is_counted_without_embedding_and_head(tmp_path: Path) -> None:
    path = write_config(tmp_path, GLM_4_5_AIR)
    model = ModelConfig(model=str(path))
    drafting = SchedulerConfig(speculative_method="mtp", num_speculative_tokens=1)
    device = replace(H200, memory_bytes=300 << 30)
    planned = Planner(read_model(path), device, device.rates)
    plan, alone = (
        planned.plan(Config(model=model, scheduler=scheduler), None) for scheduler in (drafting, SchedulerConfig())
    )
    assert plan.fits and plan.memory is not None and plan.cache is not None
    assert alone.memory is not None and alone.cache is not None
    dim, heads, experts, width = 4096, 96 * 128, 128 + 1, 1408
    attention = dim * (heads + 2 * 8 * 128) + heads * dim + heads + 2 * 8 * 128
    layer = attention + experts * 3 * dim * width + 128 * dim + 128 + 2 * dim
    wanted = 2 * (layer + 2 * dim * dim + 3 * dim)  # the projection and three norms
    assert abs(plan.memory.draft_bytes - wanted) < 2048  # correction biases are float32
    assert plan.memory.weights_bytes == alone.memory.weights_bytes
    assert plan.cache.bytes_per_token == alone.cache.bytes_per_token + 2 * 8 * 128 * 2
    assert any("MTP layer" in note for note in plan.notes)


def test_an_eagle_head_is_counted_without_an_embedding(tmp_path: Path) -> None:
    for name in ("model", "head"):
        (tmp_path / name).mkdir()
    path = write_config(tmp_path / "model", LLAMA_8B)
    layer = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32_000}
    head = write_config(tmp_path / "head", LLAMA_8B | layer)
    scheduler = SchedulerConfig(speculative_model=str(head), num_speculative_tokens=3)
    planned = Planner(read_model(path), H200, H200.rates)
    config = Config(model=ModelConfig(model=str(path)), scheduler=scheduler)
    plan, alone = (planned.plan(each, None) for each in (config, replace(config, scheduler=SchedulerConfig())))
    assert plan.memory is not None and plan.cache is not None and alone.cache is not None
    dim, keys, width = 4096, 1024, 14_336
    attention = 2 * dim * (dim + 2 * keys) + dim * dim
    wanted = 2 * (3 * dim * dim + attention + 3 * dim * width + 4 * dim + 32_000 * dim)
    assert plan.memory.draft_bytes == wanted + 4 * 32_000  # and a number for each of its tokens
    assert plan.cache.bytes_per_token == alone.cache.bytes_per_token + 2 * keys * 2


def test_the_programs_of_a_plan_return_what_a_head_reads(tmp_path: Path) -> None:
    """A speculative step is compiled with the layers that the head taps."""
    path = golden_checkpoint("qwen3_tiny").path
    head = write_head(tmp_path / "head", path)
    scheduler = SchedulerConfig(speculative_model=str(head), num_speculative_tokens=3)
    config = Config(model=ModelConfig(model=str(path), max_model_len=64), scheduler=scheduler)
    jobs: list[CompileJob] = []

    def compiled(job: CompileJob) -> Answers:
        jobs.append(job)
        return {program.name: ProgramMemory(program.name, 1, 2, 2, 3, 4, 8) for program in job.programs}

    device = find_device("cpu", 1 << 30)
    assert Planner(read_model(path), device, H200.rates).plan(config, compiled).fits
    speculate = next(program for program in jobs[0].programs if program.kind == "speculate")
    with quick_programs():
        assert isinstance(compile_program(jobs[0], speculate), ProgramMemory)


def test_a_drafter_of_gemma_4_is_counted_without_keys() -> None:
    """Its programs are compiled with the cache of the model."""
    golden = assistant_golden("gemma4_tiny")
    scheduler = SchedulerConfig(speculative_model=str(golden.path), num_speculative_tokens=3)
    config = Config(model=ModelConfig(model=str(golden.target), max_model_len=64), scheduler=scheduler)
    jobs: list[CompileJob] = []

    def compiled(job: CompileJob) -> Answers:
        jobs.append(job)
        return {program.name: ProgramMemory(program.name, 1, 2, 2, 3, 4, 8) for program in job.programs}

    device = find_device("cpu", 1 << 30)
    planned = Planner(read_model(golden.target), device, H200.rates)
    plan, alone = planned.plan(config, compiled), planned.plan(replace(config, scheduler=SchedulerConfig()), None)
    assert plan.memory is not None and plan.cache is not None and alone.cache is not None
    tensors = open_safetensors(golden.path / "model.safetensors").tensors.values()
    assert plan.memory.draft_bytes == sum(math.prod(each.shape) for each in tensors) * 4
    assert plan.cache.bytes_per_token == alone.cache.bytes_per_token
    assert "the speeds are those of steps without drafts" in plan.notes
    speculate = next(program for program in jobs[0].programs if program.kind == "speculate")
    with quick_programs():
        assert isinstance(compile_program(jobs[0], speculate), ProgramMemory)


def test_a_dflash_drafter_is_counted_without_embedding_and_head(tmp_path: Path) -> None:
    """Its programs are compiled with the layers that it taps."""
    path = golden_checkpoint("qwen3_tiny").path
    drafter = write_dflash(tmp_path / "drafter", path)
    scheduler = SchedulerConfig(speculative_model=str(drafter), num_speculative_tokens=3)
    config = Config(model=ModelConfig(model=str(path), max_model_len=64), scheduler=scheduler)
    device = find_device("cpu", 1 << 30)
    planned = Planner(read_model(path), device, H200.rates)
    plan, alone = (planned.plan(each, None) for each in (config, replace(config, scheduler=SchedulerConfig())))
    assert plan.memory is not None and plan.cache is not None and alone.cache is not None
    tensors = open_safetensors(drafter / "model.safetensors").tensors.values()
    assert plan.memory.draft_bytes == sum(math.prod(each.shape) for each in tensors) * 4
    assert plan.cache.bytes_per_token == alone.cache.bytes_per_token + 2 * 2 * 2 * 16 * 4
