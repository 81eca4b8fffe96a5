"""An agent with tools: the model calls functions of this program until it answers in text.

Start a server (`jaxserve serve`, any chat model), then: python examples/agent.py "What is 12 times 7?"
A small model may not call a function by itself: --force makes its first reply a call.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from typing import Any

MAX_TURNS = 5
OPTIONS = {"temperature": 0, "max_tokens": 200, "parallel_tool_calls": False}


def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


def word_count(text: str) -> int:
    """Count the words of a text."""
    return len(text.split())


FUNCTIONS = {function.__name__: function for function in (multiply, word_count)}
NUMBER, TEXT = {"type": "number"}, {"type": "string"}
PARAMETERS = {"multiply": {"a": NUMBER, "b": NUMBER}, "word_count": {"text": TEXT}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": function.__doc__,
            "parameters": {"type": "object", "properties": PARAMETERS[name], "required": list(PARAMETERS[name])},
        },
    }
    for name, function in FUNCTIONS.items()
]


def chat(url: str, **fields: Any) -> dict[str, Any]:
    """Return the message of one reply."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(fields).encode(), headers)
    with urllib.request.urlopen(request) as response:
        return dict(json.load(response)["choices"][0]["message"])


def run(url: str, question: str, *, is_forced: bool) -> str:
    """Answer the question, with as many calls as the model asks for."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for turn in range(MAX_TURNS):
        choice = "required" if is_forced and turn == 0 else "auto" if turn < MAX_TURNS - 1 else "none"
        reply = chat(url, messages=messages, tools=TOOLS, tool_choice=choice, **OPTIONS)
        messages.append(reply)
        if not reply.get("tool_calls"):
            return str(reply["content"])
        for call in reply["tool_calls"]:
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            result = FUNCTIONS[name](**arguments)
            print(f"{name}({arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(result)})
    return ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--force", action="store_true", help="the first reply is a call")
    arguments = parser.parse_args()
    print(run(arguments.url, arguments.question, is_forced=arguments.force))
