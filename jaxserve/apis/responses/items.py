"""The items that responses are made of, in both directions: messages, reasoning, function calls and their results."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from jaxserve.apis.openai.chat_schema import ContentLogprob
from jaxserve.frontend.images.source import ImageDetail

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputText(msgspec.Struct, tag_field="type", tag="input_text"):
    """Text that the client wrote."""

    text: str


class InputImage(msgspec.Struct, kw_only=True, tag_field="type", tag="input_image"):
    """An image, for models that read images."""

    image_url: Annotated[
        str,
        Meta(description="A `data:` URL with base64; or an http(s) URL, if `--allowed-media-domains` has its host."),
    ]
    detail: ImageDetail = "auto"


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """Text that a model wrote."""

    text: str
    annotations: Annotated[list[str], Meta(description="Always empty.")] = []
    logprobs: Annotated[
        list[ContentLogprob], Meta(description="Log-probabilities of every token, if `include` requests them.")
    ] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """Reasoning in the model's own words."""

    text: str


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text"):
    """A summary of reasoning, which clients may send; replies have none."""

    text: str


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """A message of any role."""

    id: str
    status: ItemStatus = "completed"
    role: Literal["user", "system", "developer", "assistant"]
    content: list[InputText | InputImage | OutputText]


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """The model's reasoning before its answer."""

    id: str
    summary: list[SummaryText] = []
    content: list[ReasoningText] = []
    encrypted_content: Annotated[None, Meta(description="Always null: send `content` back instead.")] = None
    status: ItemStatus = "completed"


class FunctionCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """The model wants the client to call a function."""

    id: str
    call_id: Annotated[str, Meta(description="Id that the result of the call refers to.")]
    name: str
    arguments: Annotated[str, Meta(description="JSON.")]
    status: ItemStatus = "completed"


class FunctionCallOutputItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call_output"):
    """The result of a function call, from the client."""

    id: str
    call_id: str
    output: str | list[InputText | InputImage]
    status: ItemStatus = "completed"


OutputItem = MessageItem | ReasoningItem | FunctionCallItem
Item = MessageItem | ReasoningItem | FunctionCallItem | FunctionCallOutputItem
