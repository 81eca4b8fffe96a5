"""Computes the pages of a request's prompt in the ingress, so that the router can compare them with those of replicas.

The ingress has the model's tokenizer and encodes prompts with the code of the API process: the hashes are exact. A body
that cannot be encoded, or a route without a prompt, is routed by load only; the replica answers with the error.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec
import numpy as np

from jaxserve.apis.anthropic import to_request as messages
from jaxserve.apis.anthropic.schema import MessagesRequest
from jaxserve.apis.openai import chat, completions
from jaxserve.apis.openai.chat_schema import ChatRequest
from jaxserve.apis.openai.completions_schema import CompletionRequest
from jaxserve.apis.responses import to_request as responses
from jaxserve.apis.responses.input import read_input
from jaxserve.apis.responses.schema import ResponsesRequest, check_responses
from jaxserve.apis.responses.service import RESPONSE_ID
from jaxserve.apis.schema.decode import MAX_BYTES_ON_LOOP, decode_request
from jaxserve.config import Config, LimitsConfig
from jaxserve.errors import JaxserveError
from jaxserve.frontend.encode import encode_conversation, encode_text
from jaxserve.frontend.parsers.output_format import choose_output_format
from jaxserve.frontend.prompt_embeds.prompt import EmbedsSource
from jaxserve.frontend.request import Conversation, GenerationRequest
from jaxserve.frontend.tokenization import Tokenization
from jaxserve.http.operations.routing import PAGE_KEY_BYTES
from jaxserve.ray.server_process import STATUS_TIMEOUT_S
from jaxserve.routing.request import RouteRequest, page_hashes
from jaxserve.routing.router import PolicyName
from jaxserve.runtime.models.model_runtime import tokenizer_of
from jaxserve.tenants import Tenant
from jaxserve.types import BlockHash


def _response_request(body: ResponsesRequest, limits: LimitsConfig) -> GenerationRequest:
    """Translate a request for a response. One that continues another goes to the replica that stores that one."""
    check_responses(body)
    return responses.to_request(body, read_input(body.input), limits)


_Translate = Callable[[Any, LimitsConfig], GenerationRequest]
_PROMPT_ROUTES: Final[Mapping[str, tuple[type[msgspec.Struct], _Translate]]] = MappingProxyType(
    {
        "/v1/completions": (CompletionRequest, completions.to_request),
        "/v1/chat/completions": (ChatRequest, chat.to_request),
        "/v1/messages": (MessagesRequest, messages.to_request),
        "/v1/responses": (ResponsesRequest, _response_request),
    }
)
_NAMED_RESPONSE: Final = re.compile(rb'"previous_response_id"\s*:\s*"(resp_\w+)"')
"""A quote within a text has a backslash before it, so nothing that a client quotes is found."""
_PAGE_SIZE_VALID_S: Final = 60.0
EXPECTED_OUTPUT_TOKENS: Final = 128
"""Output tokens to expect of a request that allows more."""
NO_PROMPT: Final = RouteRequest(num_prompt_tokens=0, num_output_tokens=1)
"""Stands for a request that is routed by load only."""


def response_replica(path: str, body: bytes) -> str | None:
    """Return the replica that stores the response that a request reads or continues."""
    if not path.startswith("/v1/responses"):
        return None
    found = _NAMED_RESPONSE.search(body)
    named = found[1].decode() if found is not None else path.removeprefix("/v1/responses").strip("/").partition("/")[0]
    match = RESPONSE_ID.fullmatch(named)
    return match[2] if match is not None and match[2] else None


class PageSize:
    """The tokens per page of the replicas. It is asked for again after a while: an update of the application may change it."""

    def __init__(self, ask: Callable[[], Awaitable[int | None]], clock: Callable[[], float] = time.monotonic) -> None:
        """ask: returns what a replica reports, None if it does not. It is cancelled after `STATUS_TIMEOUT_S`."""
        self._ask = ask
        self._is_asking = False
        self._clock = clock
        self._value: int | None = None
        self._valid_until_s = 0.0

    async def get(self) -> int | None:
        """Return the number of tokens per page; None while no replica has reported it. Only one caller at a time asks."""
        if not self._is_asking and (self._value is None or self._clock() > self._valid_until_s):
            self._valid_until_s = self._clock() + _PAGE_SIZE_VALID_S
            self._is_asking = True
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(STATUS_TIMEOUT_S):
                        self._value = await self._ask() or self._value
            finally:
                self._is_asking = False
        return self._value


@dataclass(frozen=True, slots=True)
class RouteKeys:
    """Makes the RouteRequest of HTTP requests."""

    config: Config
    tokens: Tokenization
    adapters: Mapping[str, int] = field(default_factory=dict)
    """Numbers of adapters by their names."""
    has_text: bool = False
    """True: requests have the text of their prompts."""

    @classmethod
    def load(cls, config: Config, path: Path, tokens: Tokenization, routing: PolicyName = "prefix") -> RouteKeys:
        """Load the tokenizer of the model at `path` into `tokens`. routing: the policy that uses the keys."""
        tokenizer, server = tokenizer_of(config, path), config.server
        templates, parsers = tokenizer.chat_templates, (server.tool_call_parser, server.reasoning_parser)
        output_format = choose_output_format(templates.sources, *parsers, takes_tools=templates.take_tools)
        tokens.install(tokenizer, output_format)
        adapters = {name: number for number, name in enumerate(config.model.adapters, start=1)}
        return cls(config, tokens, adapters, has_text=routing == "text-prefix")

    async def of(self, path: str, body: bytes, block_size: int | None, tenant: Tenant | None = None) -> RouteRequest:
        """Return the properties of a request by which it is routed. Of several prompts the first one counts.

        block_size: tokens per page of the replicas; None: not known yet, and the request is routed by load. tenant: that of the
        request's key, whose pages the replicas keep apart.
        """
        if path not in _PROMPT_ROUTES:
            return NO_PROMPT
        is_large = len(body) > MAX_BYTES_ON_LOOP  # then in threads: the ingress has other requests
        read = partial(self._read, path, body)
        try:
            request = await self.tokens.call(read) if is_large else read()
            token_ids = await self._prompt(request)
            text = await self.tokens.decode(token_ids, skip_special_tokens=False) if self.has_text else ""
            salt = request.cache_salt if tenant is None else tenant.salt(request.cache_salt)
            describe = partial(self._described, request, token_ids, text, block_size, salt)
            return await self.tokens.call(describe) if is_large else describe()
        except (JaxserveError, OverflowError):
            return NO_PROMPT

    def _read(self, path: str, body: bytes) -> GenerationRequest:
        """Return the request in a body. Raises JaxserveError."""
        struct, translate = _PROMPT_ROUTES[path]
        decoded, _ = decode_request(struct, body, self.config.limits.max_body_values)
        return translate(decoded, self.config.limits)

    def _described(
        self, request: GenerationRequest, token_ids: list[int], text: str, block_size: int | None, salt: str | None
    ) -> RouteRequest:
        """Return the properties of a request with this prompt. Raises OverflowError for ids that no vocabulary has."""
        tokens = np.array(token_ids, np.int32)
        adapter = self.adapters.get(request.model or "", 0)
        pages = () if block_size is None else page_hashes(tokens, block_size, salt, adapter)
        most = EXPECTED_OUTPUT_TOKENS if request.max_tokens is None else request.max_tokens
        return RouteRequest(
            num_prompt_tokens=len(tokens),
            num_output_tokens=request.n * min(most, EXPECTED_OUTPUT_TOKENS),
            pages=tuple(BlockHash(page[:PAGE_KEY_BYTES]) for page in pages),
            block_size=block_size or 1,
            text=text,
        )

    async def _prompt(self, request: GenerationRequest) -> list[int]:
        if isinstance(request.prompt, Conversation):
            return await encode_conversation(self.tokens, request.prompt)
        first = request.prompt.prompts[0]
        if isinstance(first, str):
            return await encode_text(self.tokens, first, add_special_tokens=request.prompt.add_special_tokens)
        return [] if isinstance(first, EmbedsSource) else first
