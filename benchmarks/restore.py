"""Measure the restore of a converted model against a plain read of the same bytes: `python -m benchmarks.restore FOLDER`.

Makes a Llama of random bfloat16 weights in FOLDER (kept for the next run), converts it, and measures in turns, in one process:
plain reads of the files of the conversion, into one buffer and into memory that is kept; the restore onto the devices; and the direct load
from safetensors. `--cold` drops the files from the system's page cache before each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from jaxserve.checkpoint.converted import ARRAYS
from jaxserve.checkpoint.safetensors_file import write_safetensors
from jaxserve.config import Config, ModelConfig
from jaxserve.executor.convert import convert
from jaxserve.executor.preparation import prepare
from jaxserve.models.registry import decoder_of, open_model
from jaxserve.weights.loader import load_params

WIDTH, FFN, HEADS, VOCAB = 1024, 4096, 16, 16384
_GIB = 1 << 30
_PIECE = 16 << 20


def make_model(folder: Path, num_layers: int) -> None:
    """Write a Llama with random weights."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)

    def weights(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape, dtype=np.float32) * 0.02).astype(ml_dtypes.bfloat16)

    tensors = {"model.embed_tokens.weight": weights(VOCAB, WIDTH), "lm_head.weight": weights(VOCAB, WIDTH)}
    tensors["model.norm.weight"] = np.ones(WIDTH, ml_dtypes.bfloat16)
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        tensors |= {f"{prefix}self_attn.{name}_proj.weight": weights(WIDTH, WIDTH) for name in "qkvo"}
        tensors |= {f"{prefix}mlp.{name}_proj.weight": weights(FFN, WIDTH) for name in ("gate", "up")}
        tensors[f"{prefix}mlp.down_proj.weight"] = weights(WIDTH, FFN)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = np.ones(WIDTH, ml_dtypes.bfloat16)
    write_safetensors(folder / "model.safetensors", tensors)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": FFN,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))


def settings(model: Path, quantization: str) -> Config:
    return Config(model=ModelConfig(model=str(model), dtype="bfloat16", quantization=quantization, max_model_len=1024))


def load(model: Path, quantization: str) -> int:
    """Load the parameters as a server does; return their bytes."""
    checkpoint = open_model(model)
    prepared = prepare(settings(model, quantization), decoder_of(checkpoint))
    params = load_params(checkpoint, prepared.skeleton, prepared.sharding, lambda *_: None)
    jax.block_until_ready(params)
    return sum(param.nbytes for param in params)


def read_files(folder: Path, *, keeps: bool) -> int:
    """Read every file of the arrays in pieces of 16 MiB, a typical parameter; return their bytes.

    keeps: each piece into memory of its own, which is kept until all are read, as parameters are; False: all into one piece.
    """
    pieces, count = [np.empty(_PIECE, np.uint8)], 0
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb", buffering=0) as file:
            while size := file.readinto(pieces[-1].data):
                count += size
                if keeps:
                    pieces.append(np.empty(_PIECE, np.uint8))
    return count


def drop(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
    os.sync()
    for file in (file for file in folder.rglob("*") if file.is_file()):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=24, help="of 32 MiB each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--cold", action="store_true")
    given = parser.parse_args()
    model = given.folder / f"model-{given.layers}"
    output = given.folder / f"converted-{given.layers}-{given.quantization}"
    if not model.exists():
        make_model(model, given.layers)
    if not output.exists():
        convert(settings(model, given.quantization), model, output, lambda *_: None)
    measured: dict[str, tuple[Path, Callable[[], int]]] = {
        "plain read": (output, lambda: read_files(output / ARRAYS, keeps=False)),
        "read and kept": (output, lambda: read_files(output / ARRAYS, keeps=True)),
        "restore": (output, lambda: load(output, given.quantization)),
        "direct load": (model, lambda: load(model, given.quantization)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in measured}
    sizes = dict.fromkeys(measured, 0)
    for index in range(given.rounds + 1):  # the first round imports and allocates
        for name, (folder, run) in measured.items():
            if given.cold:
                drop(folder)
            started = time.perf_counter()
            sizes[name] = run()
            if index:
                seconds[name].append(time.perf_counter() - started)
    plain = [
        size / value for size, value in zip([sizes["plain read"]] * given.rounds, seconds["plain read"], strict=True)
    ]
    for name, values in seconds.items():
        speeds = [sizes[name] / value for value in values]
        ratios = [speed / base for speed, base in zip(speeds, plain, strict=True)]
        print(
            f"{name}: {sizes[name] / _GIB:.2f} GiB, median {statistics.median(values):.2f} s "
            f"({min(values):.2f}-{max(values):.2f}), {statistics.median(speeds) / _GIB:.2f} GiB/s, "
            f"{statistics.median(ratios):.2f} of the plain read ({min(ratios):.2f}-{max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
