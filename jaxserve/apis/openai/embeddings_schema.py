"""`POST /v1/embeddings`: request and reply. What all three endpoints of vectors take stands in `InputFields`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from jaxserve.apis.schema.inputs import texts_or_ids
from jaxserve.apis.schema.limits import MAX_REQUEST_ID_CHARS
from jaxserve.bounds import Bound
from jaxserve.config import LimitsConfig
from jaxserve.errors import invalid
from jaxserve.frontend.bounds import check_bound, check_bounds

EncodingFormat = Literal["float", "base64"]


class InputFields(msgspec.Struct, kw_only=True):
    """What is done with each text before the model sees it."""

    model: str | None = None
    """One of the names of /v1/models; the first of them if it is not given."""
    truncate_prompt_tokens: int | None = None
    """Cut texts down to so many tokens, special ones included, from their ends; -1: to what the model takes."""
    priority: Annotated[int | None, Bound("value", -(2**31), 2**31 - 1)] = None
    """The lower, the earlier its texts are computed."""
    request_id: Annotated[str | None, Bound("characters", 1, MAX_REQUEST_ID_CHARS)] = None
    """Taken as the request's id, unless there is an X-Request-Id header."""


class EmbeddingRequest(InputFields, kw_only=True):
    input: Annotated[str | list[Any] | None, Bound("items", 1)] = None
    """A text, token ids, or a list of either."""
    encoding_format: EncodingFormat | None = None
    """`base64`: the numbers as little-endian 32-bit floats. Without it, numbers in JSON."""
    dimensions: Annotated[int | None, Bound("value", 1)] = None
    """Keep so many of a vector's first numbers, at most all. Their length is made 1 again where it was before."""
    add_special_tokens: bool | None = None
    """Whether texts get what the model expects around them, such as [CLS] and [SEP]. They do if it is not given."""
    normalize: bool | None = None
    """Whether vectors have length 1; if it is not given, as the model's checkpoint says."""
    use_activation: bool | None = None
    """A newer name for `normalize`."""


class Embedding(msgspec.Struct, kw_only=True):
    object: str = "embedding"
    index: int
    """Which of the inputs it is of."""
    embedding: list[float] | str
    """Numbers, or base64."""


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    """Of all inputs together, special tokens included."""
    total_tokens: int


class EmbeddingReply(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[Embedding]
    """In the order of the inputs."""
    model: str
    usage: EmbeddingUsage


def check_embedding(request: EmbeddingRequest, limits: LimitsConfig) -> list[str | list[int]]:
    """Check what needs neither model nor tokenizer; returns the inputs."""
    inputs = texts_or_ids("input", request.input)
    check_bound(Bound("items", 1, "max_inputs"), "input", inputs, limits)
    check_fields(request, limits)
    if request.normalize is not None and request.use_activation not in (None, request.normalize):
        raise invalid("use_activation", "it is another name for 'normalize', which says the opposite")
    return inputs


def check_fields(request: InputFields, limits: LimitsConfig) -> None:
    """Check the bounds of all fields, and how far texts may be cut."""
    check_bounds(request, limits)
    most = request.truncate_prompt_tokens
    if most is not None and most != -1 and most < 1:
        raise invalid("truncate_prompt_tokens", f"must be -1 or at least 1, got {most}")
