"""However a reply is cut, and whatever is in it: the same events, every character once, bounded work."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.frontend.parsers.formats import CHANNEL_FORMATS, REASONING_FORMATS
from jaxserve.frontend.parsers.output_format import OutputFormat
from tests.unit.frontend.parsers.reading import events_of, output_format
from tests.unit.frontend.parsers.test_tool_formats import ONE_CALL, VARIANTS

NAMES = sorted(ONE_CALL)
SPECIAL = {
    name: [
        *output_format(name).markers(with_tools=True),
        *(text for key, text in VARIANTS if key == name),
        ONE_CALL[name],
    ]
    for name in NAMES
}
REASONING = {name: spoken.markers for name, spoken in sorted(REASONING_FORMATS.items())}
NOT_JSON = (
    "muse_glimmer",
    "glm47",
    "deepseek_v32",
    "deepseek_v4",
    "pythonic",
    "olmo3",
    "lfm2",
    "functiongemma",
    "gemma",
    "gemma4",
    "qwen3_coder",
    "glm45",
    "minimax_m2",
    "seed_oss",
    "zaya_xml",
    "dots",
    "hy_v4",
)
COMMON = [
    *'{}[]()"\\,:;=<>`|\' \n', "now", "get_weather", '{"name": "now", "arguments": {', '"a"', "null", "1", "é🐚",
    "<think>", "</think>", "now(", "a=", "call:now{", "</parameter>", "<parameter=city>", "<parameter=places>", '["</parameter>', '"""',
]  # fmt: skip


@st.composite
def cut_replies(draw: st.DrawFn) -> tuple[OutputFormat, str, list[str], str]:
    """A output_format, a prompt's end, a reply of likely and unlikely parts, and the same reply in pieces."""
    name = draw(st.sampled_from(NAMES))
    reasoning = None if name in CHANNEL_FORMATS else draw(st.sampled_from([None, "qwen3", *REASONING]))
    spoken = output_format(name, reasoning)
    special = [*SPECIAL[name], *REASONING.get(reasoning or "", ())]
    parts = st.one_of(st.sampled_from(special), st.sampled_from(COMMON), st.text(max_size=4))
    texts = draw(st.lists(parts, max_size=12))
    cuts = draw(st.lists(st.integers(0, 40), max_size=12))
    text = "".join(part[: cut or None] for part, cut in zip(texts, cuts + [0] * len(texts), strict=False))
    borders = sorted({0, len(text), *draw(st.lists(st.integers(0, len(text)), max_size=8))})
    pieces = [text[i:j] for i, j in itertools.pairwise(borders)]
    return spoken, draw(st.sampled_from(["", "<think>", "<|start|>assistant"])), pieces, text


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cut_replies())
def test_any_cutting_gives_the_events_of_the_whole(case: tuple[OutputFormat, str, list[str], str]) -> None:
    check_cutting(case)


@pytest.mark.slow
@pytest.mark.exhaustive
@settings(max_examples=1000, deadline=None)
@given(cut_replies())
def test_any_cutting_of_many_more_replies(case: tuple[OutputFormat, str, list[str], str]) -> None:
    check_cutting(case)


def check_cutting(case: tuple[OutputFormat, str, list[str], str]) -> None:
    spoken, prompt_end, pieces, text = case
    whole = events_of(spoken, [text], prompt_end)
    for cut in (pieces, list(text)):
        events = events_of(spoken, cut, prompt_end)
        assert [(event.kind, event.text) for event in events] == [(event.kind, event.text) for event in whole]
        assert "".join(event.source for event in events) == text


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    name=st.sampled_from([name for name in NAMES if name not in NOT_JSON]),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=8,
    ),
    ascii_only=st.booleans(),
)
def test_json_arguments_arrive_as_they_were_written(name: str, value: object, ascii_only: bool) -> None:
    written = json.dumps({"x": value}, ensure_ascii=ascii_only)
    text = ONE_CALL[name].replace(json.dumps({"city": "Par}is", "days": 3}), written)
    (arguments,) = [event.text for event in events_of(output_format(name), list(text)) if event.kind == "arguments"]
    assert arguments == written


HOSTILE = {
    "white space": "{open} " + "\n" * 10,
    "openers": "{open}{open}",
    "half markers": "{half}",
    "brackets": '{open}{{"name": "now", "arguments": {{"a": [[[[',
    "quotes": '{open}{{"name": "now", "arguments": "\\"\\"',
    "keys": '{open}{{"type": "x", "id": "y"',
    "python": "[now(a=[(1, 'x'), {{'k': 2}}",
    "gemma": "{open}call:now{{a:[1,{{b:2",
    "tags": "<function=now><parameter=city>\n\n",
    "text": "plain text ",
}


def hostile_text(name: str, kind: str, size: int) -> str:
    opener = next(marker for marker in SPECIAL[name] if marker)
    begin = HOSTILE[kind].format(open=opener, half=opener[:-1])
    return (begin * (1 + size // len(begin)))[:size]


def read_hostile(name: str, kind: str, size: int, step: int) -> None:
    """`events_of` bounds what waits for a decision at every step: with that, the work is linear."""
    text = hostile_text(name, kind, size)
    pieces = [text[i : i + step] for i in range(0, size, step)]
    assert "".join(event.source for event in events_of(output_format(name), pieces)) == text
    once = begun_once(name, kind, size)
    assert "".join(event.source for event in events_of(output_format(name), [once])) == once


def begun_once(name: str, kind: str, size: int) -> str:
    """One beginning, and then its last character over and over."""
    begin = hostile_text(name, kind, 60)
    return begin + begin[-1] * (size - len(begin))


@pytest.mark.parametrize("kind", sorted(HOSTILE))
@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_text_leaves_nothing_waiting(name: str, kind: str) -> None:
    read_hostile(name, kind, 1_000, 1)


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", sorted(HOSTILE))
@pytest.mark.parametrize("name", ["hermes", "pythonic", "qwen3_coder"])
def test_a_long_text_is_read_in_linear_time(name: str, kind: str) -> None:
    """However long the text is, `events_of` leaves a bounded part of it waiting."""
    read_hostile(name, kind, 30_000, 3)
