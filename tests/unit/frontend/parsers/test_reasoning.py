"""Reasoning is separated from content, whether the model or its prompt wrote the marker."""

from __future__ import annotations

import pytest

from jaxserve.frontend.parsers.events import Event, merged
from tests.unit.frontend.parsers.reading import events_of, output_format, read, reply_of

THINK = output_format(reasoning="qwen3")


@pytest.mark.parametrize(
    ("prompt_end", "text", "reasoning", "content"),
    [
        ("assistant\n", "<think>\nWhy?\n</think>\n\nSo.", "Why?", "So."),
        ("assistant\n<think>\n", "Why?\n</think>\n\nSo.", "Why?", "So."),
        ("assistant\n<think>\n\n</think>\n\n", "So.", "", "So."),
        ("assistant\n", "So.", "", "So."),
        ("assistant\n", "  So. <think>x</think>", "", "  So. <think>x</think>"),
        ("assistant\n", "<think>\n\n</think>\n\nSo. \n", "", "So. \n"),
        ("assistant\n<think>\n", "Why? ", "Why? ", ""),
        ("assistant\n", "<think>a</thin", "a</thin", ""),
        ("What is <think>?\nassistant\n", "So.", "", "So."),
        ("assistant\n<think>\n", "a <think> b</think>c", "a <think> b", "c"),
        ("", "", "", ""),
    ],
)
def test_thinking_is_reasoning(prompt_end: str, text: str, reasoning: str, content: str) -> None:
    reply = read(THINK, text, prompt_end, tools={})
    assert (reply.reasoning, reply.content) == (reasoning, content)


def test_deepseek_r1_thinks_unless_its_prompt_says_otherwise() -> None:
    spoken = output_format(reasoning="deepseek_r1")
    assert read(spoken, "Why?</think>So.", "assistant").reasoning == "Why?"
    assert read(spoken, "So.", "<｜Assistant｜></think>").content == "So."


@pytest.mark.parametrize(
    ("name", "continued", "kind"),
    [
        ("deepseek_r1", "Be", "reasoning"),
        ("deepseek_r1", "<think>Be", "reasoning"),
        ("deepseek_r1", "<think>x</think>Be", "content"),
        ("qwen3", "Be", "content"),
        ("qwen3", "<think>Be", "reasoning"),
    ],
)
def test_a_continued_message_says_where_the_reply_begins(name: str, continued: str, kind: str) -> None:
    parser = output_format(reasoning=name).parser({}, "assistant\n", continued)
    assert parser is not None
    assert [(event.kind, event.text) for event in parser.feed(" so")] == [(kind, " so")]


def test_neighbours_of_one_kind_are_joined_but_not_names() -> None:
    events = [
        Event(kind, text, text) for kind, text in (("name", "f"), ("name", "g"), ("content", "a"), ("content", "b"))
    ]
    assert [event.text for event in merged(events)] == ["f", "g", "ab"]


@pytest.mark.parametrize(
    ("name", "text"), [("mistral", "[THINK]Why?[/THINK]So."), ("gemma4", "<|channel>thought\nWhy?<channel|>So.")]
)
def test_other_markers(name: str, text: str) -> None:
    reply = read(output_format(reasoning=name), text)
    assert (reply.reasoning, reply.content) == ("Why?", "So.")


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("ernie45", "<think>\nWhy?\n</think>\n\n\n<response>\nSo.\n</response>\n", "So."),
        ("hunyuan_a13b", "<think>\nWhy?\n</think>\n<answer>\nSo.\n</answer>", "So."),
        ("hunyuan_a13b", "<think>\nWhy?\n</think>\nSo <answer", "So <answer"),
        ("granite", "Here is my thought process: Why? Here is my response: So.", "So."),
        ("hy_v3", "<think:opensource>Why?</think:opensource>So.", "So."),
        ("hy_v3", "<think>Why?</think>So.", "So."),
        ("hy_v4", "<think:6124c78e>\nWhy?</think:6124c78e>\nSo.", "So."),
        ("solar_open", "<|think|>Why?<|end|><|begin|>assistant<|content|>So.", "So."),
        ("granite", "Here's my thought process: Why? Here's my response:\nSo.", "So."),
    ],
)
def test_tags_around_the_answer_and_other_openers(name: str, text: str, content: str) -> None:
    for tools in (None, "hermes"):
        reply = read(output_format(tools, name), text)
        assert (reply.reasoning, reply.content) == ("Why?", content)


def test_calls_beside_tags_of_answers_are_read() -> None:
    text = 'Why?\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
    reply = read(output_format("hermes", "ernie45"), text, "<think>\n")
    assert (reply.reasoning, reply.calls, reply.content) == ("Why?", [("now", "{}")], "")


def test_calls_after_turns_of_solar_open_are_read() -> None:
    call = "<|tool_calls|><|tool_call:begin|>0<|tool_call:name|>now<|tool_call:args|>{}<|tool_call:end|>"
    for begin, content in (("<|content|>Let me see.", "Let me see."), ("", "")):
        text = f"<|think|>Why?<|end|><|begin|>assistant{begin}{'<|end|><|begin|>assistant' * bool(begin)}{call}"
        reply = read(output_format("solar_open", "solar_open"), text, "<|end|><|begin|>assistant")
        assert (reply.reasoning, reply.calls, reply.content) == ("Why?", [("now", "{}")], content)


def test_calls_in_the_reasoning_are_thoughts_and_after_it_are_calls() -> None:
    call = '<tool_call>{"name": "now"}</tool_call>'
    reply = read(output_format("hermes", "qwen3"), f"<think>I could {call}</think>\n{call}")
    assert reply.reasoning == f"I could {call}"
    assert reply.calls == [("now", "{}")]
    assert reply.content == ""


def test_is_reasoning_follows_the_text() -> None:
    parser = THINK.parser({}, "<think>\n")
    assert parser is not None
    states = []
    for piece in ["a", "</th", "ink>", "b"]:
        parser.feed(piece)
        states.append(parser.is_reasoning)
    assert states == [True, True, False, False]


def test_reasoning_is_shown_as_it_comes() -> None:
    parser = THINK.parser({}, "<think>\n")
    assert parser is not None
    assert [reply_of(parser.feed(piece)).reasoning for piece in ["Why", " ", "not"]] == ["Why", "", " not"]


def test_plain_format_has_no_parser() -> None:
    assert output_format().parser({}, "") is None
    assert output_format("hermes").parser({}, "") is None
    assert events_of(output_format("hermes"), ["a"])[0].text == "a"
