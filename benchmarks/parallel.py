"""Compile the steps of large models for machines that are not there: `python -m benchmarks.parallel`.

Prints Markdown: the parallel sizes that `jaxserve plan` proposes, memory of one device, collectives of a step as compiled
and as counted from shapes, and the compiler's seconds. Programs of the first few layers are compiled (`--layers`): all
layers of these models are alike, and a compiler takes minutes for all of them. Needs the compilers of CUDA and TPU
(`requirements/aot.lock`), and no accelerator.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from jaxserve.config import Config, ModelConfig, ParallelConfig
from jaxserve.errors import DoesNotFitError
from jaxserve.layers.cache import pool_shapes
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.experts import ExpertsConfig
from jaxserve.model_config.rope import RopeScaling
from jaxserve.runner.inputs import Program
from jaxserve.runtime.environment import child_environment
from jaxserve.tools.planning.collectives import Collective, step_collectives
from jaxserve.tools.planning.compiler import CompileJob, ProgramMemory, compile_programs
from jaxserve.tools.planning.fit import gib, make_fit, model_sizes
from jaxserve.tools.planning.machine import Machine, find_machine, with_sizes

LLAMA_70B = DecoderConfig(  # Llama 3.1 70B
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    layers=(LayerConfig(),) * 80,
    max_position=131072,
    norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
)
QWEN3_235B = DecoderConfig(  # Qwen3-235B-A22B
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_heads=64,
    num_kv_heads=4,
    head_dim=128,
    layers=(LayerConfig(experts=ExpertsConfig(128, 8, 1536, is_normalized=True)),) * 94,
    max_position=40960,
    norm_eps=1e-6,
    rope_theta=1e6,
    qk_norm="heads",
)
MODELS: Mapping[str, DecoderConfig] = MappingProxyType({"llama-70b": LLAMA_70B, "qwen3-235b": QWEN3_235B})
MACHINES: Mapping[str, tuple[str, int]] = MappingProxyType(
    {"8 x H200": ("h200x8", 1), "2 x 8 x H200": ("h200x8", 2), "v5e-16": ("v5e-16", 4), "v6e-16": ("v6e-16", 4)}
)
DECODE_ROWS, MIXED_TOKENS, CONTEXT = 256, 2048, 32768


@dataclass(frozen=True, slots=True)
class Case:
    """One model on one machine."""

    model: str
    machine: str
    quantization: str = "none"
    parallel: ParallelConfig = ParallelConfig()
    """The default: the sizes that `jaxserve plan` proposes."""

    @property
    def found(self) -> Machine:
        name, num_hosts = MACHINES[self.machine]
        return find_machine(name, num_hosts)

    @property
    def config(self) -> Config:
        """The config with the parallel sizes."""
        model = ModelConfig(model=self.model, quantization=self.quantization, max_model_len=CONTEXT)
        return with_sizes(Config(model=model, parallel=self.parallel), MODELS[self.model], self.found)


CASES = (
    *(Case("llama-70b", machine) for machine in MACHINES),
    Case("llama-70b", "2 x 8 x H200", parallel=ParallelConfig(tensor_parallel_size=16)),
    Case("qwen3-235b", "8 x H200"),
    Case("qwen3-235b", "2 x 8 x H200"),
    Case(
        "qwen3-235b",
        "2 x 8 x H200",
        parallel=ParallelConfig(
            tensor_parallel_size=4, data_parallel_size=4, expert_parallel_size=16, expert_exchange="all-to-all"
        ),
    ),
    Case("qwen3-235b", "v5e-16", "int4-weight-only"),
    Case("qwen3-235b", "v6e-16", "int8"),
)


def rows(case: Case, num_layers: int, kinds: Sequence[str]) -> Iterator[str]:
    """Compile a step of each kind, and yield its row of the table."""
    config, device = case.config, case.found.device
    decoder = MODELS[case.model].for_devices(config.parallel.tensor_parallel_size)
    cut = replace(decoder, layers=decoder.layers[:num_layers])
    sizes = model_sizes(config, decoder, device)
    try:
        fit = make_fit(config, decoder, device)
    except DoesNotFitError as error:
        yield f"| {_title(case, config)} | does not fit: {error} |"
        return
    limits = fit.limits
    max_pages = -(-CONTEXT // limits.spec.block_size)
    programs = (
        Program("decode", DECODE_ROWS, DECODE_ROWS, max_pages, num_slots=DECODE_ROWS),
        Program("mixed", MIXED_TOKENS, DECODE_ROWS, max_pages, num_slots=DECODE_ROWS),
    )
    for program in programs:
        if program.kind not in kinds:
            continue
        assert limits.shapes is not None
        pool_shape = (num_layers, *limits.shapes[0].arrays[0].shape[1:])
        job = CompileJob(config, device, cut, pool_shapes(pool_shape, limits.kv_dtype), (program,))
        started = time.monotonic()
        answer = compile_programs(job, child_environment(), lambda *_: None)[program.name]
        seconds = time.monotonic() - started
        if not isinstance(answer, ProgramMemory):
            yield f"| {_title(case, config)} | {program.name} | {answer} |"
            continue
        counted = step_collectives(replace(sizes, decoder=cut), program.num_tokens, program.num_rows)
        whole = step_collectives(sizes, program.num_tokens, program.num_rows)
        cells = (
            _title(case, config),
            program.name,
            f"{gib(fit.weights_bytes)} + {gib(fit.kv_bytes)}",
            gib(answer.temp_bytes),
            f"{limits.num_usable_blocks * limits.spec.block_size:,}",
            _counts(answer.collectives),
            f"{gib(_sent(answer.collectives))} / {gib(_sent(counted))}",
            gib(_sent(whole)),
            f"{seconds:.0f}",
        )
        yield f"| {' | '.join(cells)} |"


def _title(case: Case, config: Config) -> str:
    parallel = config.parallel
    sizes = f"tensor {parallel.tensor_parallel_size}, data {parallel.data_parallel_size}"
    if MODELS[case.model].experts is not None:
        sizes += f", expert {parallel.expert_parallel_size} ({parallel.expert_exchange})"
    weights = "bfloat16" if case.quantization == "none" else case.quantization
    return f"{case.model}, {weights} | {case.machine}: {sizes}"


def _counts(collectives: Sequence[Collective]) -> str:
    found = [f"{each.count} {each.kind} of {gib(each.array_bytes)} over {each.num_devices}" for each in collectives]
    return "<br>".join(found)


def _sent(collectives: Sequence[Collective]) -> float:
    return sum(each.sent_bytes for each in collectives)


def main() -> int:
    """Compile, and print what came out."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parallel", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", default=["decode", "mixed"])
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the cases to compile (default: all)")
    arguments = parser.parse_args()
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        sys.exit("set JAX_PLATFORMS=cpu: this only compiles")
    for number in range(len(CASES)) if arguments.only is None else arguments.only:
        for row in rows(CASES[number], arguments.layers, arguments.kinds):
            print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
