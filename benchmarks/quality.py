"""Measure what formats of weights and of the KV cache cost in quality: `python -m benchmarks.quality TEXT --formats gguf int8`.

Every format computes the same pieces of a text. Each position's distribution is compared with that of float32 weights
(`--quantization none`): perplexity, Kullback-Leibler divergence, and how often the most likely token is the same.
`--llama-cpp q4_1 q8_0` adds llama.cpp with files of these formats, which it makes of a GGUF model as `benchmarks.peers` does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from benchmarks.peers.environment import peers_folder
from benchmarks.peers.llama_logits import llama_logits
from benchmarks.peers.llama_server import QUANTISED
from jaxserve.checkpoint.source import resolve
from jaxserve.config import CacheConfig, Config, KVCacheDtype, ModelConfig
from jaxserve.models.registry import decoder_of, open_model
from jaxserve.models.skeleton import make_skeleton
from jaxserve.quant.names import NO_QUANTIZATION, format_names
from jaxserve.runner.backend import chip_of
from jaxserve.runner.kv_scales.measurement import make_measurement
from jaxserve.runner.limits import make_policy, pool_dtype
from jaxserve.runner.program_cache import ProgramCache
from jaxserve.runtime.environment import default_model
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape
from jaxserve.tokenizer.tokenizer import load_tokenizer
from jaxserve.tools.planning.stored import bytes_by_dtype
from jaxserve.weights.loader import load_params
from tests.models.one_row import PAGE_SIZE, new_cache, step_context

LogProbs = Callable[[np.ndarray], np.ndarray]


def scorer(path: Path, name: str, num_tokens: int, kv: KVCacheDtype = "auto") -> tuple[LogProbs, int]:
    """Return a function from `num_tokens` tokens to the log-probabilities after each, and the bytes of the weights.

    kv: numbers of the KV cache, with the scales that a server has for them.
    """
    config = Config(model=ModelConfig(model=str(path), quantization=name), cache=CacheConfig(kv_cache_dtype=kv))
    checkpoint, num_pages = open_model(path), -(-num_tokens // PAGE_SIZE)
    decoder = decoder_of(checkpoint).with_context(num_pages * PAGE_SIZE)
    policy = make_policy(config, decoder, chip_of(jax.devices()[0]))
    skeleton, sharding = make_skeleton(decoder, policy), make_sharding(decoder, MeshShape())
    params = load_params(checkpoint, skeleton, sharding, lambda *_: None)
    if (measured := make_measurement(skeleton, sharding, 1, ProgramCache(None))) is not None:
        params = measured(params)
    kv_dtype = pool_dtype(config, "cpu")

    def compute(params: tuple[Array, ...], tokens: Array) -> Array:
        cache = new_cache(decoder, num_pages, kv_dtype, policy.activations)
        model = skeleton.build(params)
        hidden, _ = model.hidden(tokens, cache, step_context(decoder, num_pages, jnp.int32(0), num_tokens))
        return jax.nn.log_softmax(model.logits(hidden, jnp.int32(num_tokens)))

    compiled, mesh = jax.jit(compute), sharding.mesh.abstract_mesh

    def score(tokens: np.ndarray) -> np.ndarray:
        with jax.sharding.use_abstract_mesh(mesh):
            return np.asarray(compiled(params, jnp.asarray(tokens, jnp.int32)))

    return score, sum(array.num_bytes for array in skeleton.arrays)


def llama_scorer(path: Path, name: str, num_tokens: int) -> tuple[LogProbs, int]:
    """Return what `scorer` does, of llama.cpp with a GGUF file of this format. Raises PeerUnavailableError."""
    logits, file = llama_logits(path, name, peers_folder(), num_tokens)
    vocab_size = decoder_of(open_model(path)).vocab_size

    def score(tokens: np.ndarray) -> np.ndarray:
        return np.asarray(jax.nn.log_softmax(logits(tokens, vocab_size)))

    return score, sum(bytes_by_dtype(open_model(file)).values())


def pieces_of(path: Path, text: Path, num_tokens: int, num_pieces: int) -> list[np.ndarray]:
    """Return the first pieces of the text, each as long and after the token that begins a text, if there is one."""
    token_ids = load_tokenizer(path).encode(text.read_text(encoding="utf-8"))
    bos = decoder_of(open_model(path)).bos_token_id
    first = [bos] if bos is not None and token_ids[0] == bos else []
    own, size = token_ids[len(first) :], num_tokens - len(first)
    found = [own[start : start + size] for start in range(0, len(own) - size + 1, size)]
    return [np.array(first + piece) for piece in found[:num_pieces]]


def main(words: Sequence[str] | None = None) -> None:
    """Print one row of a Markdown table for each format."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("text", type=Path, help="a text in UTF-8")
    parser.add_argument("--model", help="default: the default model")
    parser.add_argument("--formats", nargs="*", choices=format_names()[1:], default=["gguf-weight-only", "gguf"])
    parser.add_argument(
        "--kv-cache-dtypes", nargs="+", choices=["fp8", "int8"], default=[], help="with weights in float32"
    )
    parser.add_argument(
        "--llama-cpp", nargs="+", choices=QUANTISED, default=[], help="formats of GGUF files for llama.cpp"
    )
    parser.add_argument("--num-tokens", type=int, default=512, help="tokens of a piece (default: %(default)s)")
    parser.add_argument("--num-pieces", type=int, default=10, help="default: %(default)s")
    arguments = parser.parse_args(words)
    path = default_model() if arguments.model is None else resolve(arguments.model)
    pieces = pieces_of(path, arguments.text, arguments.num_tokens, arguments.num_pieces)
    scorers = {name: scorer(path, name, arguments.num_tokens) for name in (NO_QUANTIZATION, *arguments.formats)}
    for kv in arguments.kv_cache_dtypes:
        scorers[f"{NO_QUANTIZATION}, KV cache in {kv}"] = scorer(path, NO_QUANTIZATION, arguments.num_tokens, kv)
    for name in arguments.llama_cpp:
        scorers[f"llama.cpp, {name}"] = llama_scorer(path, name, arguments.num_tokens)
    names = tuple(scorers)
    sums = {name: np.zeros(3) for name in names}  # of negative log-likelihood, KL divergence, equal best tokens
    for piece in pieces:
        reference = scorers[NO_QUANTIZATION][0](piece)[:-1]
        for name in names:
            found = reference if name == NO_QUANTIZATION else scorers[name][0](piece)[:-1]
            likelihood = np.take_along_axis(found, piece[1:, None], axis=1).sum(dtype=np.float64)
            divergence = (np.exp(reference) * (reference - found)).sum(dtype=np.float64)
            sums[name] += [-likelihood, divergence, (found.argmax(1) == reference.argmax(1)).sum()]
    count = len(pieces) * (arguments.num_tokens - 1)
    print(f"{len(pieces)} pieces of {arguments.num_tokens} tokens, {count} positions")
    print("| format | weights MB | perplexity | KL divergence | same most likely token |\n|---|---|---|---|---|")
    for name, (loss, divergence, same) in sums.items():
        print(
            f"| {name} | {scorers[name][1] / 1e6:.1f} | {np.exp(loss / count):.4f} | {divergence / count:.6f} | {same / count:.2%} |"
        )


if __name__ == "__main__":
    main()
