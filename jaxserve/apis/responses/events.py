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

from jaxserve.apis.openai.chat_schema import ContentLogprob
from jaxserve.apis.responses.items import OutputItem, OutputText, ReasoningText
from jaxserve.apis.responses.response import ResponseObject


class _OfResponse(msgspec.Struct, tag_field="type"):
    response: ResponseObject
    sequence_number: int


class ResponseCreated(_OfResponse, tag="response.created"):
    pass


class ResponseInProgress(_OfResponse, tag="response.in_progress"):
    pass


class ResponseCompleted(_OfResponse, tag="response.completed"):
    pass


class ResponseIncomplete(_OfResponse, tag="response.incomplete"):
    pass


class ResponseFailed(_OfResponse, tag="response.failed"):
    pass


class _OfItem(msgspec.Struct, tag_field="type"):
    item: OutputItem
    output_index: int
    sequence_number: int


class OutputItemAdded(_OfItem, tag="response.output_item.added"):
    """The item is still empty."""


class OutputItemDone(_OfItem, tag="response.output_item.done"):
    pass


class _OfPart(msgspec.Struct, tag_field="type"):
    part: OutputText | ReasoningText
    item_id: str
    output_index: int
    content_index: int
    sequence_number: int


class ContentPartAdded(_OfPart, tag="response.content_part.added"):
    """The part is still empty."""


class ContentPartDone(_OfPart, tag="response.content_part.done"):
    pass


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
