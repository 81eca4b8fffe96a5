"""Retrieval: the passages nearest to a question go into the prompt that answers it.

One server has both models, an embedding model and a chat model:

jaxserve serve --model chat=HuggingFaceTB/SmolLM2-1.7B-Instruct --model vectors=sentence-transformers/all-MiniLM-L6-v2
python examples/retrieval.py "How long is a page of the KV cache?" docs/caches.md docs/operating.md
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from pathlib import Path
from typing import Any


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def embed(url: str, texts: list[str], model: str | None = None) -> list[list[float]]:
    """Return a vector of length 1 for each text. model: None for the only one of a server."""
    found = post(f"{url}/v1/embeddings", {"input": texts, "truncate_prompt_tokens": -1, "model": model})["data"]
    return [one["embedding"] for one in found]


def nearest(url: str, question: str, passages: list[str], count: int, model: str | None = None) -> list[str]:
    """Return the passages whose vectors have the largest dot products with the question's."""
    wanted, *vectors = embed(url, [question, *passages], model)
    products = [sum(a * b for a, b in zip(wanted, vector, strict=True)) for vector in vectors]
    order = sorted(range(len(passages)), key=lambda i: -products[i])
    return [passages[i] for i in order[:count]]


def answer(url: str, question: str, passages: list[str], model: str | None = None) -> str:
    """Let the chat model answer from the passages."""
    text = "\n\n".join(passages)
    messages = [
        {"role": "system", "content": f"Answer the question from this text only:\n\n{text}"},
        {"role": "user", "content": question},
    ]
    body = {"model": model, "messages": messages, "max_tokens": 120, "temperature": 0}
    reply = post(f"{url}/v1/chat/completions", body)
    return str(reply["choices"][0]["message"]["content"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--embedding-model", default="vectors", help="its name at the server")
    parser.add_argument("--chat-model", default="chat", help="its name at the server")
    parser.add_argument("--count", type=int, default=2)
    arguments = parser.parse_args()
    paragraphs = [part.strip() for file in arguments.files for part in file.read_text().split("\n\n") if part.strip()]
    found = nearest(arguments.url, arguments.question, paragraphs, arguments.count, arguments.embedding_model)
    for passage in found:
        print(f"- {passage[:80]!r}")
    print(answer(arguments.url, arguments.question, found, arguments.chat_model))
