"""A batch of prompts from a JSONL file, through a running server or in this process with `LLM`.

Each line is {"id": ..., "prompt": ...}; each line of the output is {"id": ..., "text": ...}, in the same order.

python examples/batch.py prompts.jsonl replies.jsonl --url http://127.0.0.1:8000
python examples/batch.py prompts.jsonl replies.jsonl
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

CONCURRENCY = 16
"""Requests at a time: the server batches them. It answers 429 if its queue is full."""


def through_server(url: str, prompts: list[str], max_tokens: int) -> list[str]:
    """Send each prompt as a request of its own."""

    def ask(prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as response:
            return str(json.load(response)["choices"][0]["text"])

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return list(pool.map(ask, prompts))


def in_process(model: str | None, prompts: list[str], max_tokens: int, **options: Any) -> list[str]:
    """Load the model in this process; without a name, the default model."""
    from jaxserve import LLM, SamplingParams

    with LLM(**({"model": model} if model else {}), **options) as llm:
        results = llm.generate(prompts, SamplingParams(max_tokens=max_tokens, temperature=0))
    return [result.outputs[0].text for result in results]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--url", help="a running server; without it the model is loaded here")
    parser.add_argument("--model")
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.source.read_text().splitlines() if line.strip()]
    texts = [row["prompt"] for row in rows]
    if arguments.url:
        replies = through_server(arguments.url, texts, arguments.max_tokens)
    else:
        replies = in_process(arguments.model, texts, arguments.max_tokens)
    lines = [json.dumps({"id": row["id"], "text": text}) for row, text in zip(rows, replies, strict=True)]
    arguments.target.write_text("\n".join(lines) + "\n")
