"""The events of a streamed response, in the order in which they come.

response.created, response.in_progress
  for each item: response.output_item.added
    message, reasoning: response.content_part.added
                        response.output_text.delta ... or response.reasoning_text.delta ..., and .done
                        response.content_part.done
    function call:      response.function_call_arguments.delta ..., and .done
  response.output_item.done
response.completed, response.incomplete or response.failed
"""

from __future__ import annotations

import msgspec

from jaxserve.server.schema.chat import ContentLogprob
from jaxserve.server.schema.response_items import OutputItem, OutputText, ReasoningText
from jaxserve.server.schema.response_object import ResponseObject


class ResponseCreated(msgspec.Struct, tag_field="type", tag="response.created"):
    response: ResponseObject
    sequence_number: int


class ResponseInProgress(msgspec.Struct, tag_field="type", tag="response.in_progress"):
    response: ResponseObject
    sequence_number: int


class ResponseCompleted(msgspec.Struct, tag_field="type", tag="response.completed"):
    response: ResponseObject
    sequence_number: int


class ResponseIncomplete(msgspec.Struct, tag_field="type", tag="response.incomplete"):
    response: ResponseObject
    sequence_number: int


class ResponseFailed(msgspec.Struct, tag_field="type", tag="response.failed"):
    response: ResponseObject
    sequence_number: int


class OutputItemAdded(msgspec.Struct, tag_field="type", tag="response.output_item.added"):
    item: OutputItem
    """Still empty."""
    output_index: int
    sequence_number: int


class OutputItemDone(msgspec.Struct, tag_field="type", tag="response.output_item.done"):
    item: OutputItem
    output_index: int
    sequence_number: int


class ContentPartAdded(msgspec.Struct, tag_field="type", tag="response.content_part.added"):
    part: OutputText | ReasoningText
    """Still empty."""
    item_id: str
    output_index: int
    content_index: int
    sequence_number: int


class ContentPartDone(msgspec.Struct, tag_field="type", tag="response.content_part.done"):
    part: OutputText | ReasoningText
    item_id: str
    output_index: int
    content_index: int
    sequence_number: int


class OutputTextDelta(msgspec.Struct, tag_field="type", tag="response.output_text.delta"):
    delta: str
    logprobs: list[ContentLogprob]
    item_id: str
    output_index: int
    content_index: int
    sequence_number: int


class OutputTextDone(msgspec.Struct, tag_field="type", tag="response.output_text.done"):
    text: str
    logprobs: list[ContentLogprob]
    item_id: str
    output_index: int
    content_index: int
    sequence_number: int


class ReasoningTextDelta(msgspec.Struct, tag_field="type", tag="response.reasoning_text.delta"):
    delta: str
    item_id: str
    output_index: int
    content_index: int
    sequence_number: int


class ReasoningTextDone(msgspec.Struct, tag_field="type", tag="response.reasoning_text.done"):
    text: str
    item_id: str
    output_index: int
    content_index: int
    sequence_number: int


class FunctionArgumentsDelta(msgspec.Struct, tag_field="type", tag="response.function_call_arguments.delta"):
    delta: str
    item_id: str
    output_index: int
    sequence_number: int


class FunctionArgumentsDone(msgspec.Struct, tag_field="type", tag="response.function_call_arguments.done"):
    name: str
    arguments: str
    item_id: str
    output_index: int
    sequence_number: int


ResponseEvent = (
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | FunctionArgumentsDelta
    | FunctionArgumentsDone
)
