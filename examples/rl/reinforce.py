"""REINFORCE with jaxserve: the server samples, a trainer in this process learns, and its weights go back after each step.

The reward is simple and exact: the share of the letter "e" among the characters of a continuation.
Each step writes a line of JSON: the mean reward, the version of the weights that sampled, and the divergence, which is
the difference between the log-probabilities that the trainer computes for the sampled tokens and those of the server.

python examples/rl/reinforce.py --steps 40 --log run.jsonl
python examples/rl/plot.py run.jsonl run.png
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from policy import Policy, Rollouts

from jaxserve import LLM, SamplingParams
from jaxserve.llm.results import RequestOutput
from jaxserve.runtime.environment import default_model

PROMPTS = ["The weather today is", "My favourite food is", "In the old town,", "She opened the door and"]


def reward_of(text: str) -> float:
    """Return the share of "e" among the characters of a text."""
    return text.lower().count("e") / max(1, len(text))


def advantages_of(rewards: np.ndarray) -> np.ndarray:
    """Return how much better each of a prompt's replies is than their mean, in standard deviations. rewards: (prompts, n)."""
    return (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-6)


def packed(prompts: Sequence[Sequence[int]], replies: Sequence[Sequence[int]], num_new: int) -> Rollouts:
    """Return texts of one width, so that the trainer compiles once."""
    width = max(map(len, prompts)) + num_new
    tokens, places = np.zeros((len(replies), width), np.int32), np.zeros((len(replies), num_new), np.int32)
    for row, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        whole = [*prompt, *reply]
        tokens[row, : len(whole)] = whole
        places[row] = np.minimum(len(prompt) + np.arange(num_new), len(whole) - 1)
    is_real = np.arange(num_new) < np.array([len(reply) for reply in replies])[:, None]
    return Rollouts(jnp.asarray(tokens), jnp.asarray(places), jnp.asarray(is_real))


def sampled(results: Sequence[RequestOutput]) -> Iterator[tuple[list[int], list[int], list[float], str, list[int]]]:
    """Yield of each reply: prompt, tokens, their log-probabilities, text, and the version of the weights of each token."""
    for result in results:
        for output in result.outputs:
            assert output.logprobs is not None, "they were asked for"
            scores = [entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True)]
            yield result.prompt_token_ids, output.token_ids, scores, output.text, output.weight_versions


def train(llm: LLM, policy: Policy, *, steps: int, num_replies: int, num_new: int) -> Iterator[dict[str, Any]]:
    """Yield the record of each step: sample with the policy, learn, and give the server the new weights."""
    for step in range(steps):
        start = time.perf_counter()
        params = SamplingParams(n=num_replies, max_tokens=num_new, temperature=1.0, seed=step, logprobs=0)
        prompts, replies, scores, texts, versions = zip(
            *sampled(llm.generate(PROMPTS, params, progress_bar=False)), strict=True
        )
        seconds = time.perf_counter() - start
        rewards = np.array([reward_of(text) for text in texts]).reshape(len(PROMPTS), -1)
        rollouts = packed(prompts, replies, num_new)
        logprobs = np.asarray(policy.learn(rollouts, jnp.asarray(advantages_of(rewards).ravel(), jnp.float32)))
        apart = np.concatenate([own[: len(served)] - served for own, served in zip(logprobs, scores, strict=True)])
        found = {version for each in versions for version in each}
        version = llm.update_weights(arrays={name: np.asarray(weight) for name, weight in policy.weights.items()})
        yield {
            "step": step,
            "reward": float(rewards.mean()),
            "sampled_by_versions": sorted(found),
            "new_version": version,
            "divergence_max": float(np.abs(apart).max()),
            "divergence_mean": float(np.abs(apart).mean()),
            "ratio_mean": float(np.exp(apart).mean()),
            "num_tokens": len(apart),
            "text": texts[0],
            "sampling_seconds": round(seconds, 2),
            "seconds": round(time.perf_counter() - start, 2),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="REINFORCE with jaxserve.LLM")
    parser.add_argument(
        "--model", type=Path, help="a GGUF file or a Hugging Face directory (default: the default model)"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--replies", type=int, default=8, help="replies to each prompt")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--log", type=Path, default=Path("run.jsonl"))
    words = parser.parse_args()
    model = words.model or default_model()
    settings = {"dtype": "float32", "quantization": "none", "max_model_len": 128, "max_num_seqs": 32}
    policy = Policy(model, words.learning_rate)
    with LLM(model, **settings) as llm, words.log.open("w", encoding="utf-8") as log:
        counts = {"steps": words.steps, "num_replies": words.replies, "num_new": words.max_tokens}
        for record in train(llm, policy, **counts):
            print(json.dumps(record), file=log, flush=True)
            print(f"step {record['step']:3}  reward {record['reward']:.3f}  divergence {record['divergence_max']:.1e}")


if __name__ == "__main__":
    main()
