"""Measures the peak memory of loading parameters: `python -m tests.engine.load_memory MODEL [MODEL...]`.

Prints a JSON object for each: the bytes of the parameters, and by how much the resident memory of the process rose at most while they
were loaded. On a CPU, parameters are host memory, so what is above them is what loading needs.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import jax

from jaxserve.config import Config, ModelConfig
from jaxserve.executor.preparation import prepare
from jaxserve.models.registry import decoder_of, open_model
from jaxserve.weights.loader import load_params
from tests.processes import status_of


def peak_of(model: Path, dtype: str) -> dict[str, int]:
    """Load the parameters once, and drop them."""
    config = Config(model=ModelConfig(model=str(model), dtype=dtype, max_model_len=128))  # type: ignore[arg-type]
    checkpoint = open_model(model)
    prepared = prepare(config, decoder_of(checkpoint))
    largest = max(leaf.num_bytes for leaf in prepared.skeleton.leaves)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = int(status_of(os.getpid(), "VmHWM"))
    params = jax.block_until_ready(load_params(checkpoint, prepared.skeleton, prepared.sharding, lambda *_: None))
    risen = (int(status_of(os.getpid(), "VmHWM")) - before) << 10
    return {"params": sum(param.nbytes for param in params), "risen": risen, "largest": largest}


if __name__ == "__main__":
    tiny, *models = sys.argv[1:]
    peak_of(Path(tiny), "float32")  # imports, threads, arenas
    for model in models:
        print(json.dumps(peak_of(Path(model), "bfloat16")), flush=True)
