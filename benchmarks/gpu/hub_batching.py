"""transformers' continuous batching (`generate_batch`) on a model with random weights."""

from __future__ import annotations

import importlib
import time
from typing import Any

import numpy as np

from benchmarks.gpu.context import Context
from benchmarks.gpu.shapes import LLAMA_8B, TINY

NO_TOKEN = -1
"""An end that no token is: outputs are as long as wanted."""


def measure(context: Context) -> None:
    """Send the requests twice: the first time prepares kernels and graphs."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    shape = TINY if context.is_quick else LLAMA_8B
    num_requests, num_input, num_output = (2, 16, 4) if context.is_quick else (32, 128, 64)
    device = "cuda" if context.platform == "cuda" else "cpu"
    dtype = torch.bfloat16 if context.platform == "cuda" else torch.float32
    names = {key: value for key, value in shape.items() if key not in ("architectures", "model_type")}
    config = transformers.LlamaConfig(**names)
    torch.manual_seed(context.seed)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.eval()
    random = np.random.default_rng(context.seed)
    prompts = random.integers(3, shape["vocab_size"], (num_requests, num_input)).tolist()
    options = transformers.GenerationConfig(
        max_new_tokens=num_output, do_sample=False, eos_token_id=NO_TOKEN, pad_token_id=0, use_cache=True
    )
    # By default the cache takes all free memory: right on an accelerator, not on a host.
    limits = {}
    if context.is_quick:
        limits["continuous_batching_config"] = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    for turn in ("first", "second"):
        if context.recorder.left_s <= 0:
            context.recorder.problem(f"transformers, {turn} turn", "not begun: the part's time was up")
            return
        started_s = time.perf_counter()
        outputs: dict[str, Any] = model.generate_batch(inputs=prompts, generation_config=options, **limits)
        seconds = time.perf_counter() - started_s
        num_tokens = sum(len(output.generated_tokens) for output in outputs.values())
        context.recorder.figure(
            "peers, requests",
            peer=f"transformers {transformers.__version__} generate_batch",
            turn=turn,
            requests=num_requests,
            input_tokens=num_input,
            output_tokens=num_tokens,
            seconds=seconds,
            tok_per_s=num_tokens / seconds,
        )
