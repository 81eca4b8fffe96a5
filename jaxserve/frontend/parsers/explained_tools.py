"""Tools for chat templates that have no place for them: definitions, calls and results become text of messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

_EXPLANATION: Final = """You can call functions. Their definitions:
<tools>
{definitions}
</tools>
To call a function, write its name and its arguments as JSON between these tags, and nothing else:
<tool_call>
{{"name": "NAME", "arguments": {{...}}}}
</tool_call>
The results come in the next message. Answer in plain text if no function helps."""

Content = str | Sequence[Mapping[str, Any]]
"""A text, or parts: texts and images."""


def with_explained_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, takes_system: bool
) -> list[dict[str, Any]]:
    """Return the messages as a template without tools can show them.

    The system message, or the first user message if the template takes none, explains `tools` and the format of calls.
    Calls of assistants become the text that the model wrote. Results of neighbouring calls become one user message.
    """
    shown: list[dict[str, Any]] = []
    after_result = False
    for message in messages:
        if message["role"] == "tool":
            result = _result(message)
            if after_result:
                shown[-1]["content"] = _joined(shown[-1]["content"], "\n", result)
            else:
                shown.append({"role": "user", "content": result})
        else:
            shown.append(_with_calls(message))
        after_result = message["role"] == "tool"
    return _explained(shown, tools, takes_system=takes_system) if tools else shown


def _explained(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], *, takes_system: bool
) -> list[dict[str, Any]]:
    definitions = "\n".join(_json(tool["function"]) for tool in tools)
    explanation = _EXPLANATION.format(definitions=definitions)
    role = "system" if takes_system else "user"
    roles = ("system", "developer") if takes_system else ("user",)
    place = next(
        (i for i, message in enumerate(messages[: 1 if takes_system else None]) if message["role"] in roles), None
    )
    if place is None:
        return [{"role": role, "content": explanation}, *messages]
    own = messages[place]["content"]
    parts = (own, explanation) if takes_system else (explanation, own)
    messages[place] |= {"content": _joined(parts[0], "\n\n", parts[1]) if own else explanation}
    return messages


def _with_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    plain = {name: value for name, value in message.items() if name != "tool_calls"}
    if not calls:
        return plain
    texts = [
        f"<tool_call>\n{_json({'name': call['name'], 'arguments': call['arguments']})}\n</tool_call>" for call in calls
    ]
    return plain | {"content": "\n".join(filter(None, (_text(message["content"]), *texts)))}


def _result(message: Mapping[str, Any]) -> Content:
    name = message.get("name")
    heading = "<tool_response>" if name is None else f"<tool_response>\n{name}:"
    return _joined(heading, "\n", message["content"], "\n", "</tool_response>")


def _joined(*contents: Content) -> Content:
    """Return contents one after the other: a text, or parts if one of them has an image."""
    parts: list[dict[str, Any]] = []
    for part in (part for content in contents for part in _parts(content)):
        if parts and _is_text(part) and _is_text(parts[-1]):
            parts[-1] |= {"text": parts[-1]["text"] + part["text"]}
        else:
            parts.append(dict(part))
    return parts[0]["text"] if len(parts) == 1 and _is_text(parts[0]) else parts


def _parts(content: Content) -> Sequence[Mapping[str, Any]]:
    """Return the parts of a content; the texts of neighbours are lines."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    parts: list[Mapping[str, Any]] = []
    for part in content:
        if parts and _is_text(part) and _is_text(parts[-1]):
            parts.append({"type": "text", "text": "\n"})
        parts.append(part)
    return parts


def _is_text(part: Mapping[str, Any]) -> bool:
    return bool(part["type"] == "text")


def _text(content: Content) -> str:
    """Return the text of an assistant's message, which has no images."""
    return content if isinstance(content, str) else "\n".join(part["text"] or "" for part in content)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
