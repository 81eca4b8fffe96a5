"""Part 3, the server: start-up with an empty and a full compile cache, and requests over HTTP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from benchmarks.gpu.checkpoint import write_checkpoint
from benchmarks.gpu.context import Context
from benchmarks.gpu.shapes import LLAMA_1B, TINY, decoder
from benchmarks.peers.environment import last_error
from benchmarks.processes import all_processes
from jaxserve.layers.policy import plain
from jaxserve.models.skeleton import make_skeleton
from jaxserve.tools.bench.startup import free_port, http_get, started
from jaxserve.tools.planning.roofline import decode_bound
from jaxserve.tools.planning.sizes import make_sizes

HOST = "127.0.0.1"
MAX_MODEL_LEN = 2048
LOADS = ((1, 4), (32, 96))
"""Requests at a time, requests in all."""
INPUT_TOKENS, OUTPUT_TOKENS = 256, 128
QUICK_LOADS = ((1, 2), (2, 4))
QUICK_INPUT_TOKENS, QUICK_OUTPUT_TOKENS = 48, 8


def run(context: Context) -> None:
    model = context.folder / "model"
    context.recorder.expect(["cold start", "warm start"])
    started_s = time.perf_counter()
    num_bytes = write_checkpoint(model, TINY if context.is_quick else LLAMA_1B, context.seed)
    context.recorder.figure("checkpoint", gib=num_bytes / 2**30, written_in_s=time.perf_counter() - started_s)
    context.recorder.attempt("cold start", partial(_serve, context, model, "cold", has_load=True))
    context.recorder.attempt("warm start", partial(_serve, context, model, "warm", has_load=False))


def _serve(context: Context, model: Path, start: str, *, has_load: bool) -> None:
    """One life of the server."""
    port = free_port()
    with _running(context, model, port) as ready_s:
        _record_start(context, port, start, ready_s)
        if has_load:
            for concurrency, count in QUICK_LOADS if context.is_quick else LOADS:
                context.recorder.attempt(
                    f"HTTP, {concurrency} at a time", partial(_load, context, model, port, concurrency, count)
                )


@contextmanager
def _running(context: Context, model: Path, port: int) -> Iterator[float]:
    """`jaxserve serve`, in this part's process group, so that it cannot outlive the part; gives seconds to ready."""
    limits = ["--max-num-seqs", "2", "--max-num-batched-tokens", "32"] if context.is_quick else []
    limits = limits or ["--max-num-seqs", "32", "--max-num-batched-tokens", "512"]  # eight programs to compile
    length = str(256 if context.is_quick else MAX_MODEL_LEN)
    command = [sys.executable, "-m", "jaxserve.cli.main", "serve", str(model), "--served-model-name", "m"]
    command += ["--host", HOST, "--port", str(port), "--max-model-len", length, *limits]
    command += ["--attention-backend", context.attention_backend, "--no-try-kernels"]  # other parts do
    command += ["--compile-cache", str(context.folder / "programs"), "--no-enable-prefix-caching"]
    environment = {**os.environ, "JAX_PLATFORMS": context.platform}  # that one or none
    log = context.folder / "server.log"
    try:
        with started(command, port, log, context.recorder.left_s, environment=environment, own_session=False) as times:
            yield times.ready_s
    finally:
        print(log.read_text(errors="replace"), flush=True)


def _record_start(context: Context, port: int, start: str, ready_s: float) -> None:
    """Seconds to ready, and every phase as the server tells it; phases overlap."""
    report = json.loads(http_get(port, "/startup")[1])
    context.recorder.figure("start-up", start=start, phase="ready", seconds=ready_s)
    for phase in report["phases"]:
        context.recorder.figure("start-up", start=start, phase=phase["phase"], seconds=phase["seconds"])
    for program in report["programs"]:
        context.recorder.figure("programs of a server", start=start, **program)
    sources = [program["source"] for program in report["programs"]]
    compiled = sources.count("compiled")
    context.recorder.note(f"{start} start: {compiled} programs compiled, {len(sources) - compiled} from the cache")


def _load(context: Context, model: Path, port: int, concurrency: int, count: int) -> None:
    num_input = QUICK_INPUT_TOKENS if context.is_quick else INPUT_TOKENS
    num_output = QUICK_OUTPUT_TOKENS if context.is_quick else OUTPUT_TOKENS
    file = context.folder / f"load-{concurrency}.json"
    command = [sys.executable, "-m", "jaxserve.cli.main", "bench", "serve", "--url", f"http://{HOST}:{port}"]
    command += ["--workload", "custom", "--input-len", str(num_input), "--output-len", str(num_output)]
    command += ["--max-concurrency", str(concurrency), "--num-prompts", str(count), "--num-warmups", "1"]
    command += ["--seed", str(context.seed), "--tokenizer", str(model), "--json", str(file)]
    # The client needs no device, and must not take one from the server.
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    before_s = _processor_s()
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=max(1.0, context.recorder.left_s), check=False
    )
    print(done.stdout, done.stderr, flush=True)
    if done.returncode != 0 and not file.is_file():
        raise RuntimeError(f"jaxserve bench serve: {last_error(done.stderr)}")
    print(http_get(port, "/metrics")[1].decode(errors="replace"), flush=True)
    used_s = {name: seconds - before_s.get(name, 0.0) for name, seconds in _processor_s().items()}
    figures: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    bound = _bound(context, concurrency, num_input + num_output // 2)
    context.recorder.figure(
        "HTTP",
        streams=concurrency,
        requests=count,
        input_tokens=num_input,
        output_tokens=num_output,
        failed=figures["failed"],
        output_tok_per_s=figures["output_throughput"],
        decode_bound_tok_per_s=bound,
        median_ttft_ms=figures["median_ttft_ms"],
        median_tpot_ms=figures["median_tpot_ms"],
        p99_itl_ms=figures["p99_itl_ms"],
        seconds=figures["duration"],
        **{f"{name}_processor_s": seconds for name, seconds in used_s.items()},
    )


def _processor_s() -> dict[str, float]:
    """Return the processor seconds of the API process and of its children so far."""
    found = all_processes()
    api = {each.pid for each in found if each.parent == os.getpid()}
    return {
        "api": sum(each.cpu_s for each in found if each.pid in api),
        "engine": sum(each.cpu_s for each in found if each.parent in api),
    }


def _bound(context: Context, concurrency: int, tokens: int) -> float | None:
    """Tokens a second of decode steps alone, at the mean context."""
    if context.bounds is None:
        return None
    dtype = jnp.dtype(jnp.bfloat16 if context.platform == "cuda" else jnp.float32)
    sizes = make_sizes(make_skeleton(decoder(TINY if context.is_quick else LLAMA_1B), plain(dtype)))
    return decode_bound(sizes, context.bounds.rates, dtype.itemsize, concurrency, tokens, fits=True).tokens_per_s
