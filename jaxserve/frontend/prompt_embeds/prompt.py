"""Embeddings of one prompt: read from a request under limits, and cut into parts for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

import numpy as np

from jaxserve.errors import ContextLengthError, InvalidRequestError, invalid, unsupported
from jaxserve.frontend.images.base64_parts import decode_base64
from jaxserve.frontend.prompt_embeds.formats import TYPES, TensorError, read_tensor
from jaxserve.ipc.messages import ModelInfo
from jaxserve.ipc.prompt_embeds import PromptEmbeds, PromptEmbedsInfo
from jaxserve.ipc.transport import MAX_IMAGE_BYTES

MAX_VALUE: Final = 65504.0
"""Largest absolute value of an embedding's number, float16's: squares of it do not overflow in a norm, and no overflow reaches
the KV cache, whose pages other requests use later."""
_OVERHEAD_BYTES: Final = 1 << 16
"""Most bytes of a file beside its numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class EmbedsSource:
    """Embeddings of one prompt as the caller gave them."""

    content: str | np.ndarray
    """A file in base64, or an array of T x D numbers."""
    place: str
    """The field of the request, for error texts."""


@dataclass(frozen=True, eq=False)
class LoadedEmbeds:
    """The embeddings of one prompt. Their memory counts until this object is gone."""

    parts: list[PromptEmbeds]
    num_tokens: int

    @property
    def num_bytes(self) -> int:
        return sum(len(part.values) for part in self.parts)


def require_embeds(source: EmbedsSource, info: ModelInfo) -> PromptEmbedsInfo:
    """Return the sizes of embeddings that the server takes. Raises UnsupportedParameterError if it takes none."""
    if info.prompt_embeds is None:
        raise unsupported(source.place, "needs a server that was started with --enable-prompt-embeds")
    return info.prompt_embeds


def load_embeds(source: EmbedsSource, info: PromptEmbedsInfo, max_model_len: int) -> LoadedEmbeds:
    """Return the embeddings of a prompt, checked. Raises InvalidRequestError or ContextLengthError naming the field."""
    content = source.content
    if isinstance(content, str):
        most = min(max_model_len * info.width * 4, MAX_IMAGE_BYTES) + _OVERHEAD_BYTES
        if len(content) // 4 * 3 > most + 3:  # before anything is decoded
            raise invalid(source.place, f"embeddings of this model's longest prompt take at most {most} bytes")
        try:
            data = decode_base64(content)
        except ValueError:
            raise invalid(source.place, "it is not base64") from None
        try:
            values = read_tensor(data)
        except TensorError as error:
            raise invalid(source.place, str(error)) from None
    else:
        values = np.asarray(content, "<f4")
    values = _checked(source.place, values, info, max_model_len)
    starts = range(0, len(values), info.piece_tokens)
    parts = [_part(values[start : start + info.piece_tokens], start) for start in starts]
    return LoadedEmbeds(parts, len(values))


def read_array(given: Any, place: str) -> EmbedsSource:
    """Return embeddings that a program gave as an array of numpy, JAX or torch. Raises InvalidRequestError."""
    try:
        values = np.asarray(given)
        if values.dtype.name in ("float32", "float16", "bfloat16", "float64"):
            return EmbedsSource(values.astype(np.float32), place)
        reason = f"got {values.dtype.name}"
    except (TypeError, ValueError, RuntimeError) as error:  # such as torch's for a type that numpy does not have
        reason = str(error)[:200].rstrip(".")
    raise invalid(place, f"must be an array of {TYPES} with tokens x width numbers, {reason}")


def _checked(place: str, values: np.ndarray, info: PromptEmbedsInfo, max_model_len: int) -> np.ndarray:
    """Return the embeddings as `[T, D]`. Raises InvalidRequestError or ContextLengthError."""
    shape = list(values.shape)
    if values.ndim == 3 and shape[0] == 1:
        values = values[0]
    if values.ndim != 2 or values.shape[1] != info.width:
        raise invalid(place, f"its shape must be [tokens, {info.width}], got {shape[:8]}")
    if not len(values):
        raise invalid(place, "it has no tokens")
    if len(values) >= max_model_len:
        raise ContextLengthError(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt has {len(values)} "
            "embeddings, which leaves no room for output. Please reduce the length of the input prompt.",
            param=place,
        )
    if values.nbytes > MAX_IMAGE_BYTES:
        raise invalid(place, f"embeddings of a prompt may take {MAX_IMAGE_BYTES} bytes in float32, got {values.nbytes}")
    most = float(np.abs(values).max())
    if not most <= MAX_VALUE:  # NaN compares as false
        raise invalid(place, f"its numbers must be finite and at most {MAX_VALUE:g}, got {most:g}")
    return values


def _part(values: np.ndarray, start: int) -> PromptEmbeds:
    data = np.ascontiguousarray(values, "<f4").tobytes()
    digest = sha256(b"prompt_embeds %d %d:" % values.shape + data).digest()
    return PromptEmbeds(start, len(values), digest, data)


def refuse_scores(place: str, prompts: Sequence[object]) -> None:
    """Raise InvalidRequestError if the tokens of one of `prompts` would be shown or scored though it has none."""
    if any(isinstance(prompt, EmbedsSource) for prompt in prompts):
        raise _no_tokens(place)


def _no_tokens(place: str) -> InvalidRequestError:
    return unsupported(place, "is not supported together with prompt_embeds, which have no tokens to show or to score")
