"""The field `input`, checked and brought into one form: items with ids and lists of parts."""

from __future__ import annotations

import uuid
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from jaxserve.apis.responses.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputImage,
    InputText,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    SummaryText,
)
from jaxserve.errors import invalid
from jaxserve.frontend.checks import missing, refuse, shorten
from jaxserve.frontend.messages import IMAGE_ROLE_PARTS, ContentPart, check_parts, refuse_images

_ROLES: Final = ("user", "system", "developer", "assistant")


class InputItem(msgspec.Struct, kw_only=True):
    """One item; which fields it has depends on its type. Without a type it is a message."""

    type: Annotated[
        str | None, Meta(description="`message`, `reasoning`, `function_call` or `function_call_output`.")
    ] = None
    id: str | None = None
    status: Annotated[
        str | None, Meta(description="Status of an item from a reply; every item counts as complete.")
    ] = None
    phase: Annotated[str | None, Meta(description="Hint in an assistant message, without effect.")] = None
    role: str | None = None
    content: Annotated[str | list[ContentPart] | None, Meta(description="Content of messages and reasoning.")] = None
    summary: list[ContentPart] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None


def read_input(given: str | list[InputItem]) -> list[Item]:
    """Return the items of a request. Raises InvalidRequestError or UnsupportedParameterError naming the place."""
    if isinstance(given, str):
        return [MessageItem(id=new_id("msg"), role="user", content=[InputText(given)])]
    return [_item(f"input[{i}]", item) for i, item in enumerate(given)]


def new_id(prefix: str) -> str:
    """Return a new id in OpenAI's form."""
    return f"{prefix}_{uuid.uuid4().hex}"


def _item(place: str, item: InputItem) -> Item:
    match item.type:
        case None | "message":
            return _message(place, item)
        case "reasoning":
            return _reasoning(place, item)
        case "function_call":
            return FunctionCallItem(
                id=item.id or new_id("fc"),
                call_id=_required(f"{place}.call_id", item.call_id),
                name=_required(f"{place}.name", item.name),
                arguments=_required(f"{place}.arguments", item.arguments),
            )
        case "function_call_output":
            output = item.output
            if output is None:
                raise missing(f"{place}.output")
            return FunctionCallOutputItem(
                id=item.id or new_id("fco"),
                call_id=_required(f"{place}.call_id", item.call_id),
                output=output if isinstance(output, str) else _shown(f"{place}.output", output),
            )
    raise refuse(f"{place}.type", item.type)


def _message(place: str, item: InputItem) -> MessageItem:
    role = _required(f"{place}.role", item.role)
    if role not in _ROLES:
        raise invalid(f"{place}.role", f"must be one of {', '.join(_ROLES)}, got {shorten(role)}")
    if item.content is None:
        raise missing(f"{place}.content")
    content: list[InputText | InputImage | OutputText] = []
    if role == "user" and isinstance(item.content, list):
        content += _shown(f"{place}.content", item.content)
    else:
        if isinstance(item.content, list):
            refuse_images(f"{place}.content", item.content, role)
        texts = _texts(f"{place}.content", item.content)
        content += [OutputText(text=text) if role == "assistant" else InputText(text) for text in texts]
    return MessageItem(id=item.id or new_id("msg"), role=role, content=content)  # type: ignore[arg-type]


def _shown(place: str, parts: list[ContentPart]) -> list[InputText | InputImage]:
    """Return parts of which some may be images."""
    check_parts(place, parts, *IMAGE_ROLE_PARTS)
    return [
        _image(f"{place}[{j}]", part) if part.is_image else InputText(part.text or "") for j, part in enumerate(parts)
    ]


def _image(place: str, part: ContentPart) -> InputImage:
    image = part.image(place)
    return InputImage(image_url=image.url, detail=image.detail or "auto")


def _reasoning(place: str, item: InputItem) -> ReasoningItem:
    content = _texts(f"{place}.content", item.content or [], "reasoning_text")
    summary = _texts(f"{place}.summary", item.summary or [], "summary_text")
    if item.encrypted_content and not (content or summary):
        raise refuse(f"{place}.encrypted_content")
    return ReasoningItem(
        id=item.id or new_id("rs"),
        summary=[SummaryText(text) for text in summary],
        content=[ReasoningText(text) for text in content],
    )


def _texts(place: str, content: str | list[ContentPart], *types: str) -> list[str]:
    """Return the texts of parts. Default of `types`: those of messages."""
    if isinstance(content, str):
        return [content]
    check_parts(place, content, *types)
    return [part.text or "" for part in content]


def _required(place: str, value: str | None) -> str:
    if value is None:
        raise missing(place)
    return value
