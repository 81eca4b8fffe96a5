"""A decode step of a Llama in plain torch: fused projections, a static KV cache, SDPA, and on a GPU a CUDA graph.

All rows have the same length, so that nothing is masked and SDPA may take its fastest kernel.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.context import Context
from benchmarks.gpu.shapes import LLAMA_8B, TINY
from benchmarks.gpu.timing import time_calls

EPSILON = 1e-5


@dataclass(frozen=True, slots=True)
class TorchModel:
    """Weights `[out, in]`; torch itself is passed along, since it may not be installed."""

    torch: Any
    device: str
    dtype: Any
    config: dict[str, Any]
    embedding: Any
    head: Any
    layers: list[dict[str, Any]]

    @property
    def head_dim(self) -> int:
        return int(self.config["hidden_size"] // self.config["num_attention_heads"])


@contextmanager
def model(context: Context) -> Iterator[TorchModel]:
    """Random weights on the device, gone afterwards."""
    torch = importlib.import_module("torch")
    config = TINY if context.is_quick else LLAMA_8B
    device = "cuda" if context.platform == "cuda" else "cpu"
    dtype = torch.bfloat16 if context.platform == "cuda" else torch.float32
    torch.manual_seed(context.seed)
    wide, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    dim = wide // config["num_attention_heads"]
    qkv = wide + 2 * config["num_key_value_heads"] * dim

    def random(*shape: int) -> Any:
        return torch.randn(shape, device=device, dtype=dtype) * shape[-1] ** -0.5

    layers = [
        {
            "qkv": random(qkv, wide),
            "out": random(wide, wide),
            "up": random(2 * inner, wide),
            "down": random(wide, inner),
        }
        for _ in range(config["num_hidden_layers"])
    ]
    yield TorchModel(torch, device, dtype, config, random(vocab, wide), random(vocab, wide), layers)
    layers.clear()
    if device == "cuda":
        torch.cuda.empty_cache()


def measure(context: Context, model: TorchModel, batch: int, length: int) -> None:
    torch = model.torch
    with torch.inference_mode():
        step = _make_step(model, batch, length)
        is_graph = model.device == "cuda"
        call = _as_graph(torch, step) if is_graph else step
        wait: Callable[[Any], object] = (lambda _: torch.cuda.synchronize()) if is_graph else (lambda _: None)
        timing = time_calls(call, wait, budget_s=1.0)
    context.recorder.figure(
        "peers, decode steps",
        peer="torch SDPA, CUDA graph" if is_graph else "torch SDPA",
        batch=batch,
        context=length,
        step_ms=timing.median_s * 1e3,
        tok_per_s=batch / timing.median_s,
    )


def measure_prefill(context: Context, length: int) -> None:
    """Causal attention of one layer over a prompt, by the flash kernel of SDPA; nothing is in pages."""
    torch = importlib.import_module("torch")
    attention = importlib.import_module("torch.nn.attention")
    config = TINY if context.is_quick else LLAMA_8B
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config["hidden_size"] // heads
    is_cuda = context.platform == "cuda"
    where = {"device": "cuda", "dtype": torch.bfloat16} if is_cuda else {"device": "cpu", "dtype": torch.float32}
    q, k, v = (torch.randn(1, count, length, dim, **where) for count in (heads, kv_heads, kv_heads))

    def call() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    with torch.inference_mode(), attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
        timing = time_calls(call, lambda _: torch.cuda.synchronize() if is_cuda else None)
    flops = 2 * heads * dim * length * (length + 1)  # two matmuls over half a square
    context.recorder.figure(
        "peers, prefill attention, one layer",
        peer="torch SDPA, flash",
        tokens=length,
        ms=timing.median_s * 1e3,
        tflop_per_s=flops / timing.median_s / 1e12,
        of_matmul=context.share_of_matmul(flops, timing.median_s),
    )


def _make_step(model: TorchModel, batch: int, length: int) -> Callable[[], Any]:
    """One step: the token at position `length - 1` attends to all before it."""
    torch, config = model.torch, model.config
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], model.head_dim
    shape = (len(model.layers), 2, batch, kv_heads, length, dim)
    cache = torch.randn(shape, device=model.device, dtype=model.dtype)
    tokens = torch.zeros(batch, dtype=torch.long, device=model.device)
    positions = torch.arange(0, dim, 2, device=model.device, dtype=torch.float32)
    angles = (length - 1) * config["rope_theta"] ** (-positions / dim)
    cos, sin = angles.cos().to(model.dtype), angles.sin().to(model.dtype)
    functional = torch.nn.functional

    def norm(x: Any) -> Any:
        return functional.rms_norm(x, (x.shape[-1],), eps=EPSILON)

    def rotate(x: Any) -> Any:
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def step() -> Any:
        x = model.embedding[tokens]
        for index, layer in enumerate(model.layers):
            qkv = (norm(x) @ layer["qkv"].T).view(batch, heads + 2 * kv_heads, 1, dim)
            q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
            cache[index, 0, :, :, length - 1 : length] = rotate(k)
            cache[index, 1, :, :, length - 1 : length] = v
            attended = functional.scaled_dot_product_attention(
                rotate(q), cache[index, 0], cache[index, 1], enable_gqa=True
            )
            x = x + attended.reshape(batch, heads * dim) @ layer["out"].T
            gate, up = (norm(x) @ layer["up"].T).chunk(2, -1)
            x = x + (functional.silu(gate) * up) @ layer["down"].T
        tokens.copy_((norm(x) @ model.head.T).argmax(-1))
        return tokens

    return step


def _as_graph(torch: Any, step: Callable[[], Any]) -> Callable[[], Any]:
    """The step recorded once and replayed: no launch costs are left."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replay: Callable[[], Any] = graph.replay
    return replay
