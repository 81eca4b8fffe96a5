"""From a parser's events to the content blocks of Anthropic's messages: the events of a stream, and their sum."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from jaxserve.apis.anthropic.reply import (
    Block,
    BlockDelta,
    BlockEvent,
    BlockStart,
    BlockStop,
    InputDelta,
    SignatureDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from jaxserve.frontend.parsers.events import Event, Kind


class BlockEvents:
    """The events of one message's blocks, in order. One block is open at a time."""

    def __init__(self, new_call_id: Callable[[], str], *, shows_thinking: bool) -> None:
        self._new_call_id = new_call_id
        self._shows_thinking = shows_thinking
        self._num_calls = 0
        self._num_blocks = 0
        self._open: Kind | None = None
        """The kind of the open block's events."""
        self._digest = hashlib.sha256()

    @property
    def has_calls(self) -> bool:
        """True once a call has begun."""
        return self._num_calls > 0

    def of(self, events: Iterable[Event]) -> list[BlockEvent]:
        """Return the block events of a parser's events."""
        return [seen for event in events for seen in self._of(event)]

    def end(self) -> list[BlockEvent]:
        """Return the events that end the open block."""
        if self._open is None:
            return []
        index = self._num_blocks - 1
        signed = [BlockDelta(index, SignatureDelta(self._digest.hexdigest()))] if self._open == "reasoning" else []
        self._open = None
        return [*signed, BlockStop(index)]

    def _of(self, event: Event) -> list[BlockEvent]:
        self._num_calls += event.kind == "name"
        if event.kind == "syntax":
            return []
        seen: list[BlockEvent] = []
        if event.kind == "name" or event.kind != self._open:
            seen = [*self.end(), BlockStart(self._num_blocks, self._empty_block(event))]
            self._num_blocks += 1
            self._open = "arguments" if event.kind == "name" else event.kind
        delta = self._delta(event)
        return seen if delta is None else [*seen, BlockDelta(self._num_blocks - 1, delta)]

    def _empty_block(self, event: Event) -> Block:
        if event.kind == "content":
            return TextBlock("")
        if event.kind == "reasoning":
            self._digest = hashlib.sha256()
            return ThinkingBlock("", "")
        return ToolUseBlock(self._new_call_id(), event.text, {})

    def _delta(self, event: Event) -> TextDelta | ThinkingDelta | InputDelta | None:
        match event.kind:
            case "content":
                return TextDelta(event.text)
            case "arguments":
                return InputDelta(event.text)
            case "reasoning":
                self._digest.update(event.text.encode("utf-8", "surrogatepass"))
                return ThinkingDelta(event.text) if self._shows_thinking else None
        return None


def blocks_of(events: Iterable[BlockEvent]) -> list[Block]:
    """Return the blocks that a whole stream adds up to."""
    blocks: list[Block] = []
    arguments: list[str] = []
    for event in events:
        match event:
            case BlockStart(content_block=block):
                blocks.append(block)
                arguments = []
            case BlockDelta(delta=InputDelta(partial_json=text)):
                arguments.append(text)
            case BlockDelta(delta=delta):
                for name in delta.__struct_fields__:
                    setattr(blocks[-1], name, getattr(blocks[-1], name) + getattr(delta, name))
            case BlockStop():
                if isinstance(blocks[-1], ToolUseBlock):
                    blocks[-1].input = _input("".join(arguments))
    return blocks


def _input(arguments: str) -> dict[str, Any]:
    """Return the arguments as an object; other text is kept under the name that Anthropic gives it."""
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {"INVALID_JSON": arguments}
