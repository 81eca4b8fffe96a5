"""Requests for the experts that tokens chose: what they need, and how the experts are written."""

from __future__ import annotations

import base64
import io
from typing import Final

import numpy as np

from jaxserve.errors import invalid
from jaxserve.ipc.messages import ModelInfo
from jaxserve.ipc.routed_experts import RoutedExpertsInfo

FIELD: Final = "return_routed_experts"
MAX_BYTES: Final = 128 << 20
"""Most bytes of the experts of one sequence: half of the largest message of an engine."""


def require_routed_experts(info: ModelInfo) -> RoutedExpertsInfo:
    """Return the sizes of a token's experts. Raises InvalidRequestError if the engine does not return them."""
    if info.routed_experts is None:
        raise invalid(
            FIELD, "needs a model with experts, and a server that was started with --enable-return-routed-experts"
        )
    return info.routed_experts


def check_size(info: RoutedExpertsInfo, num_prompt_tokens: int, max_tokens: int) -> None:
    """Raise InvalidRequestError if the experts of so many tokens do not fit a message."""
    num_tokens, most = num_prompt_tokens + max_tokens, MAX_BYTES // info.token_bytes
    if num_tokens > most:
        raise invalid(
            FIELD, f"returns at most {most} tokens, prompt and `max_tokens` are {num_tokens}; reduce `max_tokens`"
        )


class ExpertParts:
    """The experts of one sequence as the engine sends them."""

    def __init__(self, info: RoutedExpertsInfo) -> None:
        self._info = info
        self._parts: list[bytes] = []

    def add(self, part: bytes | None) -> None:
        """Take the experts of the next tokens, if an output has some."""
        if part is not None:
            self._parts.append(part)

    def take(self, num_prompt_tokens: int, num_tokens: int) -> np.ndarray:
        """Return the experts of the prompt and of `num_tokens` generated tokens but the last, which no step has computed.

        The array is `[tokens, layers, top_k]`.
        """
        parts, self._parts = self._parts, []
        experts = np.frombuffer(b"".join(parts), self._info.dtype).reshape(-1, *self._info.shape)
        return experts[: num_prompt_tokens + max(num_tokens, 1) - 1]


def npy_base64(array: np.ndarray) -> str:
    """Return an array as a file of numpy's format (.npy) in base64."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getbuffer()).decode()
