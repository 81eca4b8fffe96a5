"""Messages and tools in the form that OpenAI's API and chat templates share, their checks, and the choice of tools."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from jaxserve.bounds import Bound
from jaxserve.config import LimitsConfig
from jaxserve.errors import InvalidRequestError, invalid, unsupported
from jaxserve.frontend.checks import check_json_chars, missing, refuse, shorten
from jaxserve.frontend.images.source import ImageDetail, ImageSource

_TEXT_PARTS: Final = ("text", "input_text", "output_text")
_IMAGE_PARTS: Final = ("image_url", "input_image")
_VIDEO_PART: Final = "video_url"
IMAGE_ROLES: Final = ("user", "tool")
"""Roles whose messages may hold images and videos."""
IMAGE_ROLE_PARTS: Final = (*_TEXT_PARTS, *_IMAGE_PARTS)
"""Types of the parts of their messages, beside videos of chat messages."""


class ImageUrl(msgspec.Struct, kw_only=True):
    url: Annotated[
        str,
        Meta(description="A `data:` URL with base64; or an http(s) URL, if `--allowed-media-domains` has its host."),
    ]
    detail: Annotated[
        ImageDetail | None,
        Meta(description="`low`: the image is reduced to 512 x 512 pixels first; all else: the model's own sizes."),
    ] = None


class VideoUrl(msgspec.Struct, kw_only=True):
    url: Annotated[
        str,
        Meta(description="A `data:` URL with base64; or an http(s) URL, if `--allowed-media-domains` has its host."),
    ]


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None
    image_url: Annotated[
        ImageUrl | str | None, Meta(description="The image of a part `image_url` (an object) or `input_image` (a URL).")
    ] = None
    detail: Annotated[ImageDetail | None, Meta(description="As in `image_url`; of a part `input_image`.")] = None
    video_url: Annotated[VideoUrl | None, Meta(description="The video of a part `video_url`.")] = None
    file_id: Annotated[str | None, Meta(description="Rejected: this server stores no files.")] = None

    @property
    def is_video(self) -> bool:
        return self.type == _VIDEO_PART

    @property
    def is_image(self) -> bool:
        """True for a part that shows something: an image or a video."""
        return self.type in _IMAGE_PARTS or self.is_video

    def image(self, place: str) -> ImageSource:
        """Return the image or the video. Raises InvalidRequestError naming a field of the part at `place`."""
        if self.is_video:
            if self.video_url is None:
                raise missing(f"{place}.video_url")
            return ImageSource(self.video_url.url, f"{place}.video_url.url", is_video=True)
        if self.file_id is not None:
            raise refuse(f"{place}.file_id")
        if self.image_url is None:
            raise missing(f"{place}.image_url")
        if isinstance(self.image_url, str):
            return ImageSource(self.image_url, f"{place}.image_url", self.detail)
        return ImageSource(self.image_url.url, f"{place}.image_url.url", self.image_url.detail or self.detail)


class CalledFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: Annotated[
        str | dict[str, Any], Meta(description="JSON as in the reply; a decoded object is accepted as well.")
    ] = "{}"


class MessageToolCall(msgspec.Struct, kw_only=True):
    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    function_call: Any = None
    audio: Any = None
    reasoning: str | None = None
    reasoning_content: str | None = None


def check_messages(messages: Sequence[ChatMessage], *, is_last_continued: bool = False) -> None:
    """Raise InvalidRequestError for messages and parts that cannot be rendered, naming their place.

    is_last_continued: the reply continues the last message.
    """
    for i, message in enumerate(messages):
        for name in ("function_call", "audio"):
            if getattr(message, name):
                raise refuse(f"messages[{i}].{name}")
        if message.tool_calls and message.role != "assistant":
            raise invalid(f"messages[{i}].tool_calls", f"only an assistant calls tools, not a {message.role}")
        if message.content is None and message.role != "assistant":
            raise invalid(f"messages[{i}].content", f"a {message.role} message needs a string or text parts")
        if isinstance(message.content, list):
            if message.role not in IMAGE_ROLES:
                refuse_images(f"messages[{i}].content", message.content, message.role)
            check_parts(f"messages[{i}].content", message.content, *IMAGE_ROLE_PARTS, _VIDEO_PART)
    last = messages[-1]
    if is_last_continued and (last.role != "assistant" or not last.content or last.tool_calls):
        raise invalid(
            "continue_final_message", "the last message must be an assistant's, with content and without tool calls"
        )


def refuse_images(place: str, parts: list[ContentPart], role: str) -> None:
    """Raise UnsupportedParameterError for the first image in a message of a role that shows none."""
    for i, part in enumerate(parts):
        if part.is_image:
            raise unsupported(
                f"{place}[{i}].type",
                f"is {shorten(part.type)}: images are read with the role user and in results of tools, not with the role {role}",
            )


def check_parts(place: str, parts: list[ContentPart], *types: str) -> None:
    """Raise InvalidRequestError for parts without a text and for other types. Default of `types`: those of messages."""
    for i, part in enumerate(parts):
        if part.type not in (types or _TEXT_PARTS):
            raise refuse(f"{place}[{i}].type", part.type)
        if part.text is None and not part.is_image:
            raise missing(f"{place}[{i}].text")
        own = "video_url" if part.is_video else "image_url" if part.is_image else "text"
        for other in {"text", "image_url", "video_url"} - {own}:
            if getattr(part, other):
                raise invalid(
                    f"{place}[{i}].{other}", f"a part of type {part.type} has none: send it as a part of its own"
                )


def read_images(messages: Sequence[ChatMessage]) -> list[ImageSource]:
    """Return the images and videos of chat messages, in their order. Raises InvalidRequestError naming the place of one without a URL."""
    return [
        part.image(f"messages[{i}].content[{j}]")
        for i, message in enumerate(messages)
        if isinstance(message.content, list)
        for j, part in enumerate(message.content)
        if part.is_image
    ]


_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class FunctionDefinition(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(msgspec.Struct, kw_only=True):
    type: str
    function: FunctionDefinition | None = None


class AllowedTools(msgspec.Struct, kw_only=True):
    """Part of OpenAI's `tool_choice` of the type `allowed_tools`."""

    mode: Literal["auto", "required"]
    tools: list[ToolDefinition]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The choice of functions that a reply may or must call."""

    mode: str = "auto"
    """`auto`, `none`, `required`, or `function`: a call of the one that is named."""
    name: str | None = None
    given: object = None
    """The caller's value, for error texts. None: the caller chose nothing."""
    allowed: frozenset[str] | None = None
    """Names of the functions that the template shows and a reply may call. None: all."""

    @property
    def is_forced(self) -> bool:
        """True if every reply must be a call."""
        return self.mode in ("required", "function")

    @classmethod
    def read(cls, given: str | dict[str, Any] | None) -> ToolChoice:
        """Return the choice that OpenAI's chat completions spell as a word or an object."""
        if not isinstance(given, dict):
            return cls() if given is None else cls(given, given=given)
        if given.get("type") == "allowed_tools":
            return cls._among(given)
        function = given.get("function")
        name = function.get("name") if given.get("type") == "function" and isinstance(function, dict) else None
        return cls("function", name if isinstance(name, str) else None, given)

    @classmethod
    def _among(cls, given: dict[str, Any]) -> ToolChoice:
        """Return the choice of the type `allowed_tools`. Raises InvalidRequestError."""
        with contextlib.suppress(msgspec.ValidationError):
            options = msgspec.convert(given.get("allowed_tools"), AllowedTools)
            names = [tool.function.name for tool in options.tools if tool.type == "function" and tool.function]
            if names and len(names) == len(options.tools):
                return cls(options.mode, given=given, allowed=frozenset(names))
        raise invalid(
            "tool_choice", f"allowed_tools must have a mode, auto or required, and functions, got {shorten(given)}"
        )

    def check(self, names: set[str]) -> None:
        """Raise InvalidRequestError for a choice among other functions than `names`."""
        if self.given is None or self.mode == "none" or (self.mode == "auto" and self.allowed is None and not names):
            return
        if not names:
            raise InvalidRequestError("When using `tool_choice`, `tools` must be set.", param="tool_choice")
        if unknown := sorted((self.allowed or frozenset()) - names):
            raise invalid("tool_choice", f"none of the tools is {shorten(unknown[0])}")
        if self.mode == "function" and self.name not in names:
            raise invalid("tool_choice", f"none of the tools is {shorten(self.given)}")
        if self.mode not in ("auto", "required", "function"):
            raise invalid(
                "tool_choice", f"must be none, auto, required, a function or allowed_tools, got {shorten(self.given)}"
            )


def read_tools(tools: Sequence[ToolDefinition] | None) -> list[FunctionDefinition]:
    """Return the functions of OpenAI's tools. Raises InvalidRequestError for tools that are no functions."""
    functions = []
    for i, tool in enumerate(tools or ()):
        if tool.type != "function":
            raise unsupported(f"tools[{i}].type", f"must be 'function', got {shorten(tool.type)}")
        if tool.function is None:
            raise missing(f"tools[{i}].function")
        functions.append(tool.function)
    return functions


def check_functions(functions: Sequence[FunctionDefinition], place: str, limits: LimitsConfig) -> set[str]:
    """Return the functions' names. Raises InvalidRequestError; `place` is the format of a function's path."""
    names: set[str] = set()
    for i, function in enumerate(functions):
        path = place.format(i)
        if not _NAME.fullmatch(function.name):
            raise invalid(f"{path}.name", f"1 to 64 of a-z A-Z 0-9 _ . -, got {shorten(function.name)}")
        if function.name in names:
            raise invalid(f"{path}.name", f"{function.name} is defined twice")
        names.add(function.name)
        check_json_chars(Bound("characters", 0, "max_function_chars"), path, function, limits)
    return names
