"""Measure what LoRA adapters cost: `python -m benchmarks.adapters`.

Two engines in one process, of the same model: one without adapters, and one with random adapters of all its projections. In each round
they run the same load in turns: without adapters, for the base model beside loaded adapters that no request uses, and with another
adapter for each next request. The second engine compiles after the first is ready; the log calls that compiling while serving.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.checkpoint.safetensors_file import write_safetensors
from jaxserve.checkpoint.source import resolve
from jaxserve.config import CacheConfig, Config, ModelConfig, SchedulerConfig
from jaxserve.engine.core import EngineCore
from jaxserve.engine.process import build_core, build_executor
from jaxserve.ipc.engine_spec import EngineSpec
from jaxserve.ipc.messages import AddRequest
from jaxserve.models.registry import decoder_of, open_model
from jaxserve.runtime.environment import default_model
from jaxserve.sampling.params import EngineSamplingParams
from jaxserve.types import RequestId

CASES: Final = ("no adapters", "unused", "active")
_PROJECTIONS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_MAX_MODEL_LEN: Final = 512
_KV_BYTES: Final = 1 << 30


def write_adapter(
    folder: Path, checkpoint: Checkpoint, rank: int, seed: int, projections: tuple[str, ...] = _PROJECTIONS
) -> None:
    """Write a random adapter of these projections in PEFT's form."""
    random = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for name, info in checkpoint.tensors.items():
        module = name.removesuffix(".weight")
        if not module.endswith(projections) or len(info.shape) != 2:
            continue
        outputs, inputs = info.shape
        for part, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
            values = 0.01 * random.standard_normal(shape, dtype=np.float32)
            tensors[f"base_model.model.{module}.{part}.weight"] = values
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(projections), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    write_safetensors(folder / "adapter_model.safetensors", tensors)


def make_core(model: Path, quantization: str, num_streams: int, adapters: Sequence[Path] = ()) -> EngineCore:
    """Load the model, with adapters, into an engine of its own."""
    config = Config(
        model=ModelConfig(
            model=str(model),
            quantization=quantization,
            max_model_len=_MAX_MODEL_LEN,
            lora_modules=",".join(f"{folder.name}={folder}" for folder in adapters) or None,
        ),
        cache=CacheConfig(kv_cache_memory=_KV_BYTES),
        scheduler=SchedulerConfig(max_num_seqs=num_streams),
    )
    spec = EngineSpec(config=config, model_path=str(model), address="")
    return build_core(spec, build_executor(spec, lambda *_: None))


def tokens_per_second(core: EngineCore, prompts: Sequence[Sequence[int]], num_outputs: int, num_adapters: int) -> float:
    """Run all prompts at once, request i with the adapter i modulo their number, 0: with none; return output tokens a second."""
    sampling = EngineSamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True)
    started_s, num_left = time.perf_counter(), len(prompts)
    for index, prompt in enumerate(prompts):
        number = 1 + index % num_adapters if num_adapters else 0
        core.handle(AddRequest(RequestId(str(index)), list(prompt), sampling, adapter=number))
    while num_left:
        step = core.step()
        for output in () if step is None else step.outputs:
            if output.error is not None:
                raise RuntimeError(output.error.message)
            num_left -= output.finish_reason is not None
    return len(prompts) * num_outputs / (time.perf_counter() - started_s)


def row(num_streams: int, found: dict[str, list[float]]) -> str:
    """Return a row of the table: medians, and the median, least and most of the rounds' ratios to no adapters."""
    cells = [str(num_streams), f"{statistics.median(found[CASES[0]]):.1f}"]
    for name in CASES[1:]:
        ratios = [own / base for own, base in zip(found[name], found[CASES[0]], strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        cells.append(f"{statistics.median(found[name]):.1f} = {spread}")
    return f"| {' | '.join(cells)} |"


def main(words: Sequence[str] | None = None) -> None:
    """Print a Markdown table with a row for each number of streams."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", help="default: the default model")
    parser.add_argument("--quantization", default="none", help="default: %(default)s")
    parser.add_argument("--num-adapters", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--rank", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32], help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="after one that is not counted (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--output-tokens", type=int, default=64, help="default: %(default)s")
    arguments = parser.parse_args(words)
    model = default_model() if arguments.model is None else resolve(arguments.model)
    with tempfile.TemporaryDirectory() as root:
        checkpoint = open_model(model)
        folders = [Path(root, f"adapter-{number}") for number in range(arguments.num_adapters)]
        for seed, folder in enumerate(folders):
            write_adapter(folder, checkpoint, arguments.rank, seed)
        most = max(arguments.streams)
        base, adapted = (make_core(model, arguments.quantization, most, each) for each in ((), folders))
    engines = {CASES[0]: (base, 0), CASES[1]: (adapted, 0), CASES[2]: (adapted, arguments.num_adapters)}
    random, vocab_size = np.random.default_rng(0), decoder_of(checkpoint).vocab_size
    print(f"{arguments.num_adapters} adapters of rank {arguments.rank}; output tokens/s, of the rate without adapters")
    print("| streams | no adapters | loaded, unused | active |\n|---|---|---|---|")
    for num_streams in arguments.streams:
        found: dict[str, list[float]] = {name: [] for name in CASES}
        for number in range(1 + arguments.rounds):
            prompts = random.integers(5, vocab_size, (num_streams, arguments.prompt_tokens)).tolist()
            for name in CASES if number % 2 else reversed(CASES):
                core, num_adapters = engines[name]
                speed = tokens_per_second(core, prompts, arguments.output_tokens, num_adapters)
                if number:
                    found[name].append(speed)
        print(row(num_streams, found))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
