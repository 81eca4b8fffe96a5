"""Show the compiled decode step of Llama-3.1-8B for a GPU, without one: `python -m benchmarks.gpu.static --device a100`.

Prints Markdown: the launches of one layer with the bytes that each reads and writes, all of them against the layer's
weights, all that is read with the keys and values of rows of 1k and 8k tokens against weights, keys and values alone, and
whether the step is one CUDA graph. Outputs of a compiler that had no device to tune matmuls
on: on one, matmuls may be others. Needs a compiler of CUDA (`requirements/aot.lock`), and no GPU.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.gpu.shapes import LLAMA_8B, decoder
from jaxserve.config import Config, ModelConfig
from jaxserve.layers.cache import pool_shapes
from jaxserve.layers.policy import KVScaleKind, plain
from jaxserve.models.skeleton import ModelSkeleton, make_skeleton
from jaxserve.runner.backend import choose_backend
from jaxserve.runner.inputs import Program
from jaxserve.runner.steps import GENERATION, forward, generation_task, lower
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape
from jaxserve.tools.planning.devices import ACCELERATORS
from jaxserve.tools.planning.fit import planned_chip
from jaxserve.tools.planning.targets import described_devices

PAGE_SIZE, NUM_PAGES, MAX_PAGES = 16, 8192, 512
CONTEXTS = (1000, 8000)
KEYS = 64
"""Keys are read in tiles of as many, by every kernel of ours."""
KV_NUMBERS = 2 * LLAMA_8B["num_key_value_heads"] * LLAMA_8B["hidden_size"] // LLAMA_8B["num_attention_heads"]
"""Numbers of a token's keys and values in one layer."""
KV_SCALES: dict[str, KVScaleKind | None] = {"bfloat16": None, "float8_e4m3fn": "heads", "int8": "numbers"}
"""Scales of the KV cache by its type, of the kind that the server measures or checkpoints have."""
THUNKS = "*thunk_sequence_after_thunk_passes.txt"
"""Name of the file to read, among those that `xla_dump_to` writes."""
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "bf16": 2, "f16": 2, "s16": 2, "s32": 4, "u32": 4, "f32": 4}
_SHAPE = re.compile(r"\b(" + "|".join(_BYTES) + r")\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)(?:, |$)")
_FREE = ("parameter", "constant", "bitcast", "get-tuple-element", "tuple", "after-all")
"""Instructions that are no work."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One instruction of the program's outermost level that the device has to do something for."""

    name: str
    scope: str
    """Scope in the model's code, such as `layer_1/mlp/mul`; its neighbour's if the compiler lost it."""
    read_bytes: int
    written_bytes: int


def launches(text: str, pool_bytes: int, computation: str | None = None) -> list[Launch]:
    """Return the launches of a compiled program, or of one computation of it, such as a branch.

    Arrays of all pages, `pool_bytes`, count as 0 bytes: few are read.
    """
    sizes: dict[str, int] = {}
    found: list[Launch] = []
    for name, shape, opcode, operands, scope in _instructions(text, computation):
        size = sum(size for size in _sizes(shape) if size != pool_bytes)
        sizes[name] = size
        if opcode in _FREE:
            continue
        read = sum(sizes.get(operand, 0) for operand in dict.fromkeys(re.findall(r"%([\w.-]+)", operands)))
        found.append(Launch(name, scope or (found[-1].scope if found else ""), read, size))
    return found


def branches(text: str) -> list[list[str]]:
    """Return the names of the branches of each condition of a compiled program that has more than two."""
    return [re.findall(r"%([\w.-]+)", names) for names in re.findall(r"branch_computations=\{(.*?)\}", text)]


def _instructions(text: str, computation: str | None) -> Iterator[tuple[str, str, str, str, str]]:
    entry = text[text.index("\nENTRY " if computation is None else f"\n%{computation} (") + 1 :]
    for line in entry[: entry.index("\n}")].splitlines()[1:]:
        match = _INSTRUCTION.match(re.sub(r"/\*.*?\*/", "", line))
        if match:
            scope = re.search(r'op_name="(?:jit\(step\)/)?([^"]*)"', line)
            yield (*match.groups(), scope.group(1) if scope else "")  # type: ignore[misc]


def _sizes(shape: str) -> Iterator[int]:
    for dtype, dimensions in _SHAPE.findall(shape):
        yield _BYTES[dtype] * math.prod(int(size) for size in dimensions.split(",") if size)


@dataclass(frozen=True, slots=True)
class Step:
    """A compiled step."""

    launches: list[Launch]
    outside_graphs: list[str]
    """Kinds of work on the host, outside of CUDA graphs."""
    weight_bytes: int
    """Bytes of one layer's weights."""
    text: str = field(repr=False)
    """The compiled program."""

    def layer(self, number: int) -> list[Launch]:
        """Return the launches of one layer."""
        return [launch for launch in self.launches if f"layer_{number}/" in launch.scope]


def compile_step(
    batch: int,
    num_layers: int,
    *,
    kind: str = "decode",
    num_tokens: int | None = None,
    device: str = "h200",
    kv_dtype: str = "bfloat16",
    is_sampled: bool = True,
) -> Step:
    """A step of the model's first layers, for a batch of rows. Call in a process with JAX_PLATFORMS=cpu.

    is_sampled: False ends it before the head, whose sampler takes the compiler longer than a layer.
    A process must not compile for GPUs of several kinds: Mosaic GPU (jax 0.12) assembles all kernels for the first one.
    """
    config, target = decoder(LLAMA_8B), ACCELERATORS[device]
    config = replace(config, layers=config.layers[:num_layers])
    dtype = jnp.dtype("bfloat16" if planned_chip(target).capability >= (8, 0) else "float16")  # type: ignore[operator]
    kv_dtype = dtype.name if kv_dtype == "bfloat16" else kv_dtype
    served = Config(model=ModelConfig(model="random"))
    backend = choose_backend(served, config, planned_chip(target), dtype, jnp.dtype(kv_dtype))
    policy = replace(plain(dtype), backend=backend, fused_for=1, kv_scales=KV_SCALES.get(kv_dtype))
    skeleton = make_skeleton(config, policy)
    devices = described_devices(target, 1)
    sharding = make_sharding(config, MeshShape(), devices)
    task, num_slots = (generation_task("gpu"), batch) if is_sampled else (replace(GENERATION, step=forward), 0)
    program = Program(kind, num_tokens or batch, batch, MAX_PAGES, num_slots=num_slots)  # type: ignore[arg-type]
    pool_shape = (num_layers, NUM_PAGES, config.num_kv_heads, PAGE_SIZE, config.head_dim)
    with tempfile.TemporaryDirectory() as dumps:
        options: dict[str, str | bool] = {"xla_dump_to": dumps, "xla_dump_hlo_as_text": True}
        with jax.default_device(devices[0]):  # Mosaic GPU asks it for the architecture
            lowered = lower(skeleton, sharding, program, pool_shapes(pool_shape, kv_dtype), task=task)
        compiled = lowered.compile(options)
        (thunks,) = Path(dumps).glob(THUNKS)
        sequence = thunks.read_text(encoding="utf-8")
    text = compiled.as_text()
    assert text is not None, "the compiler of CUDA prints its programs"
    pool_bytes = jnp.dtype(kv_dtype).itemsize * math.prod(pool_shape)
    return Step(launches(text, pool_bytes), outside_graphs(sequence), _layer_weights(skeleton), text)


def outside_graphs(sequence: str) -> list[str]:
    """Kinds of work at the outermost level of a thunk sequence, but for graphs (command buffers)."""
    outermost = re.findall(r"^\d+: k(\w+)", sequence, re.MULTILINE)
    return [kind for kind in outermost if kind != "CommandBuffer"]


def _layer_weights(skeleton: ModelSkeleton) -> int:
    leaves = (leaf for leaf in skeleton.leaves if ".layers.0." in leaf.name)
    return sum(leaf.num_bytes for leaf in leaves)


def main() -> int:
    """Compile, and print what came out."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.static", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--layers", type=int, default=3)
    gpus = [name for name, device in ACCELERATORS.items() if device.platform == "gpu"]
    parser.add_argument("--device", choices=gpus, default="h200")
    parser.add_argument("--kv-dtype", choices=list(KV_SCALES), default="bfloat16")
    arguments = parser.parse_args()
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        parser.error("set JAX_PLATFORMS=cpu: nothing runs, and no device may be asked")
    print(
        f"jax {jax.__version__}, Llama-3.1-8B in bfloat16, the first {arguments.layers} layers, "
        f"a KV cache in {arguments.kv_dtype}, {arguments.device} (described)\n"
    )
    for batch in arguments.batches:
        step = compile_step(batch, arguments.layers, device=arguments.device, kv_dtype=arguments.kv_dtype)
        _print(batch, arguments.layers, step, KV_NUMBERS * jnp.dtype(arguments.kv_dtype).itemsize)
    return 0


def _print(batch: int, num_layers: int, step: Step, kv_bytes: int) -> None:
    graph = "one CUDA graph" if not step.outside_graphs else f"outside of graphs: {', '.join(step.outside_graphs)}"
    print(f"## Batch {batch}: {graph}\n\n| launch of a layer | in | MB read | MB written |\n|---|---|---|---|")
    scope = f"layer_{num_layers // 2}/"
    layer = step.layer(num_layers // 2)
    for launch in layer:
        block, name = launch.scope.partition(scope)[2].partition("/")[0], launch.name.partition(".")[0]
        print(f"| {name} | {block} | {launch.read_bytes / 1e6:.2f} | {launch.written_bytes / 1e6:.2f} |")
    around = sum("layer_" not in launch.scope for launch in step.launches)
    print(f"\n{len(layer)} launches in this layer, {around} around the layers.")
    least, moved = step.weight_bytes, sum(launch.read_bytes + launch.written_bytes for launch in layer)
    print(f"{moved / 1e6:.1f} MB moved in it, {moved / least:.3f} of its weights. Keys and values come on top:\n")
    for context in CONTEXTS:
        ideal = least + batch * context * kv_bytes
        read = moved + batch * -(-context // KEYS) * KEYS * kv_bytes
        print(f"- {context:,} tokens a row: {read / 1e6:.1f} MB, {read / ideal:.3f} of weights, keys and values alone")
    print()


if __name__ == "__main__":
    sys.exit(main())
