"""Requests with the fields that coding agents and chat programs send, turn by turn: each is served as its program needs it.

The model calls tools and does not reason; its template has a switch for reasoning.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from jaxserve.frontend.parsers.formats import TOOL_FORMATS
from jaxserve.frontend.parsers.output_format import OutputFormat
from jaxserve.tokenizer.tokenizer import Tokenizer
from tests.unit.apis.test_replies import EOS, play
from tests.unit.apis.test_tools import tooled
from tests.unit.running_api import Api, running_api

__all__ = ["tooled"]
WITHOUT_REASONING = OutputFormat(TOOL_FORMATS["hermes"])
SCHEMA: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"command": {"type": "string", "description": "The command"}, "timeout": {"type": "number"}},
    "required": ["command"],
    "additionalProperties": False,
}
FUNCTION = {"name": "run", "description": "Runs a command", "parameters": SCHEMA}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION | {"strict": False}}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "run", "arguments": '{"command":"ls"}'}}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
CLAUDE_CODE: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 1000,
    "stream": True,
    "temperature": 1,
    "metadata": {"user_id": "user_0_account_1_session_2"},
    "system": [
        {"type": "text", "text": "You are an agent."} | EPHEMERAL,
        {"type": "text", "text": "More."} | EPHEMERAL,
    ],
    "tools": [{"name": "run", "description": "Runs a command", "input_schema": SCHEMA} | EPHEMERAL],
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "medium"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"} | EPHEMERAL]}],
}
CLAUDE_CODE_NEXT = [
    *CLAUDE_CODE["messages"],
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm", "signature": ""},
            {"type": "text", "text": "Let me look."},
            {"type": "tool_use", "id": "toolu_1", "name": "run", "input": {"command": "ls"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a.py", "is_error": False} | EPHEMERAL,
            {"type": "text", "text": "<system-reminder>Be brief.</system-reminder>"},
        ],
    },
]


def message(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


CODEX: dict[str, Any] = {
    "model": "tiny",
    "instructions": "You are an agent.",
    "input": [message("developer", "<permissions>"), message("user", "<environment_context>"), message("user", "Hi")],
    "tools": [{"type": "function", "strict": False} | FUNCTION],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
    "text": {"verbosity": "low"},
}
CODEX_NEXT = [
    *CODEX["input"],
    {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me look."}]},
    {"type": "function_call", "name": "run", "arguments": '{"command":"ls"}', "call_id": "call_1"},
    {"type": "function_call_output", "call_id": "call_1", "output": "a.py"},
]
CLINE: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "You are an agent."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "<task>Hi</task>"}, {"type": "text", "text": "<environment_details>"}],
        },
    ],
    "temperature": 0,
    "max_tokens": 1000,
    "tools": CHAT_TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": False,
} | STREAM
CLINE_NEXT = [
    *CLINE["messages"],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "a.py"},
    {"role": "user", "content": [{"type": "text", "text": "<environment_details>"}]},
]
USER = [{"role": "user", "content": "Hi"}]
PROGRAMS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "Claude Code": (
        "/v1/messages?beta=true",
        CLAUDE_CODE,
        {"context_management"},
    ),
    "Claude Code, second turn": (
        "/v1/messages?beta=true",
        CLAUDE_CODE | {"messages": CLAUDE_CODE_NEXT},
        {"context_management"},
    ),
    "Codex": ("/v1/responses", CODEX, set()),
    "Codex, second turn": ("/v1/responses", CODEX | {"input": CODEX_NEXT}, set()),
    "Open WebUI": ("/v1/chat/completions", {"model": "tiny", "messages": USER, "temperature": 0.8} | STREAM, set()),
    "Open WebUI, title": (
        "/v1/chat/completions",
        {"model": "tiny", "messages": USER, "stream": False, "max_completion_tokens": 1000},
        set(),
    ),
    "Cline": ("/v1/chat/completions", CLINE, set()),
    "Cline, second turn": ("/v1/chat/completions", CLINE | {"messages": CLINE_NEXT}, set()),
    "Continue": (
        "/v1/chat/completions",
        {"model": "tiny", "messages": USER, "max_tokens": 1000, "tools": CHAT_TOOLS, "parallel_tool_calls": False}
        | STREAM,
        set(),
    ),
    "Continue, completion": (
        "/v1/completions",
        {
            "model": "tiny",
            "prompt": "def f(",
            "max_tokens": 1000,
            "temperature": 0.01,
            "stop": ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "/src/", "#- coding: utf-8", "```"],
            "stream": True,
        },
        set(),
    ),
    "n8n": (
        "/v1/chat/completions",
        {
            "model": "tiny",
            "messages": USER,
            "temperature": 0.7,
            "top_p": 1,
            "frequency_penalty": 0,
            "presence_penalty": 0,
            "n": 1,
            "stream": False,
        },
        set(),
    ),
    "llm": ("/v1/chat/completions", {"model": "tiny", "messages": USER} | STREAM, set()),
}
LAST_EVENTS = {"/v1/messages?beta=true": "message_stop", "/v1/responses": "response.completed"}


@pytest.fixture
async def api(tooled: Tokenizer) -> AsyncIterator[Api]:
    async with running_api(tooled, output_format=WITHOUT_REASONING, max_model_len=4000) as running:
        yield running


@pytest.mark.parametrize("program", PROGRAMS)
async def test_a_program_is_answered(api: Api, program: str) -> None:
    path, body, ignored = PROGRAMS[program]

    async def post() -> str:
        headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,context-management"}
        async with api.http.post(path, json=body, headers=headers) as response:
            text = await response.text()
            assert response.status == 200, text
            names = response.headers.get("x-jaxserve-ignored", "")
            assert {*names.split(",")} - {""} == ignored
            return text

    text, _ = await asyncio.gather(
        post(), play(api, [[*api.tokenizer.encode("Hello", False), EOS]], finish_reason="stop")
    )
    assert "Hello" in text
    if not body["stream"]:
        assert json.loads(text)["choices"][0]["finish_reason"] == "stop"
    elif path in LAST_EVENTS:
        last = json.loads(text.strip().rpartition("data: ")[2])
        assert last["type"] == LAST_EVENTS[path]
    else:
        assert text.endswith("data: [DONE]\n\n")
        assert ('"usage":{"prompt_tokens"' in text) == ("stream_options" in body)
