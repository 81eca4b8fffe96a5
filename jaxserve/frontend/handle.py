"""One GenerationRequest in the engine: its choices, their outputs, counts and times."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from jaxserve.frontend.choices.choice_stream import ChoiceStream, OutputDelta
from jaxserve.frontend.encode import RequestNotes
from jaxserve.frontend.engine_client.output_stream import Consumer, OutputStream, PromptPages
from jaxserve.frontend.frontend import Frontend
from jaxserve.frontend.reply_budget import num_routed_tokens
from jaxserve.ipc.messages import AddRequest, ModelInfo, RequestOutput
from jaxserve.tenants import TENANT
from jaxserve.types import RequestId

_LARGE: Final = 2048
"""Tokens, or log-probabilities, of a large reply."""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Numbers of tokens so far: each prompt once, the completions of all choices."""

    num_prompt: int
    num_completion: int = 0
    num_cached: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    num_reasoning: int = 0
    num_accepted: int = 0
    """Draft tokens that are in the reply."""
    num_rejected: int = 0


@dataclass(slots=True)
class Usage:
    """Tokens of one HTTP request: those of the prompts and of the replies that were generated."""

    num_prompt: int = 0
    num_completion: int = 0

    def use(self, num_prompt: int, num_completion: int) -> None:
        """Count tokens of a request to the engine that has ended."""
        self.num_prompt += num_prompt
        self.num_completion += num_completion


USAGE: Final[ContextVar[Usage | None]] = ContextVar("usage", default=None)
"""The usage of the request that is being served; None outside of HTTP."""


class RequestTiming(msgspec.Struct):
    """Times of all choices together. Null where nothing was generated."""

    queue_seconds: Annotated[
        float | None,
        Meta(description="Time from the request's arrival in the engine to its first step."),
    ] = None
    time_to_first_token_seconds: Annotated[
        float | None, Meta(description="Time from the tokenized prompt to the first token.")
    ] = None
    total_seconds: Annotated[float, Meta(description="Time from the tokenized prompt to the end.")] = 0.0
    tokens_per_second: Annotated[
        float | None,
        Meta(
            description="Tokens after the first one, divided by the time from the first to the last; null for one token."
        ),
    ] = None
    weight_version: Annotated[
        int | None, Meta(description="Version of the weights that computed the last token: 0, plus 1 for each update.")
    ] = None
    weight_version_tokens: Annotated[
        dict[str, int] | None,
        Meta(
            description="Generated tokens of all choices by the version that computed them, up to and with the one that "
            "ended the text; each choice's tokens have the versions in ascending order."
        ),
    ] = None
    choice_weight_version_tokens: Annotated[
        list[dict[str, int]] | None,
        Meta(
            description="The tokens of `weight_version_tokens` of each choice by itself, in the order of the choices."
        ),
    ] = None


class RequestHandle:
    """The choices of one request, prompt by prompt, `n` each.

    Use as a context manager: entering submits the engine requests, leaving aborts those that still run.
    """

    def __init__(
        self,
        choices: Sequence[ChoiceStream],
        num_choices_per_prompt: int,
        model_info: ModelInfo,
        frontend: Frontend,
        *,
        notes: RequestNotes,
        inputs: Sequence[object] = (),
        pages: PromptPages = MappingProxyType({}),
    ) -> None:
        """inputs: images and embeddings of the prompts; their memory counts as long as this handle. pages: as for
        `EngineClient.submit`."""
        self.notes = notes
        self._inputs = inputs
        self._pages = pages
        self.choices = choices
        self.model_info = model_info
        self._num_choices_per_prompt = num_choices_per_prompt
        self._frontend = frontend
        self._by_id = {choice.request.request_id: choice for choice in choices}
        self._outputs: OutputStream | None = None
        self._tenant, self._usage = TENANT.get(), USAGE.get()
        self._exit = ExitStack()

    @property
    def requests(self) -> list[AddRequest]:
        return [choice.request for choice in self.choices]

    @property
    def is_large(self) -> bool:
        """True if the whole reply takes long to format and encode."""
        num_scores = sum(
            choice.num_tokens * (1 + (choice.request.sampling.num_top_logprobs or 0)) for choice in self.choices
        )
        is_prompt_scored = any(request.sampling.num_prompt_logprobs is not None for request in self.requests)
        return is_prompt_scored or num_routed_tokens(self.requests) > _LARGE or num_scores > _LARGE

    def __enter__(self) -> RequestHandle:
        with ExitStack() as stack:
            if _has_scores(self.choices[0].request):  # all choices have the same options
                routed = self.model_info.routed_experts
                experts_bytes = 0 if routed is None else routed.token_bytes
                stack.enter_context(self._frontend.replies.reserved(self.requests, experts_bytes))
            stack.callback(self._record_end)
            self._outputs = stack.enter_context(self._frontend.client.submit(self.requests, self._pages))
            for choice in self.choices:
                choice.open(self._frontend.tokenization.tokenizer)
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._exit.close()

    @property
    def is_finished(self) -> bool:
        """True once every choice has ended and all outputs are consumed."""
        return self._stream.is_finished

    async def consume(self, consume: Consumer, idle_s: float = 0) -> bool:
        """Push engine outputs to `consume`, which hands them to `deltas`; see `OutputStream.consume`."""
        return await self._stream.consume(consume, idle_s)

    async def collect(self) -> list[list[OutputDelta]]:
        """Wait for the end; return the deltas of each choice."""
        found: list[list[OutputDelta]] = [[] for _ in self.choices]

        def gather(outputs: list[RequestOutput]) -> bool:
            for delta in self.deltas(outputs):
                found[delta.index].append(delta)
            return True

        while not self.is_finished:
            await self.consume(gather)
        return found

    def deltas(self, outputs: Sequence[RequestOutput]) -> list[OutputDelta]:
        """Return one delta for each choice that has something to show, however many outputs of it there are.

        A choice that a stop string ended is aborted in the engine. Raises the RequestError of the first choice that fails.
        """
        by_choice: dict[RequestId, list[RequestOutput]] = {}
        for output in outputs:
            by_choice.setdefault(output.request_id, []).append(output)
        deltas = []
        for request_id, own in by_choice.items():
            choice = self._by_id[request_id]
            delta = None if choice.is_finished else choice.push(own)
            if delta is not None:
                deltas.append(delta)
            if choice.is_finished:
                self._stream.stop(request_id)
        return deltas

    def counts(self) -> TokenCounts:
        """Return the numbers of tokens so far."""
        firsts = self.choices[:: self._num_choices_per_prompt]
        return TokenCounts(
            num_prompt=sum(choice.num_prompt_tokens for choice in firsts),
            num_completion=sum(choice.num_tokens for choice in self.choices),
            num_cached=sum(choice.num_cached_tokens for choice in firsts),
            num_reasoning=sum(choice.num_reasoning_tokens for choice in self.choices),
            num_accepted=sum(choice.num_accepted_tokens for choice in self.choices),
            num_rejected=sum(choice.num_rejected_tokens for choice in self.choices),
        )

    def timing(self) -> RequestTiming:
        """Return the times so far."""
        begin_s = min(choice.times.submitted_s for choice in self.choices)
        first_s = min(
            (choice.times.first_token_s for choice in self.choices if choice.times.first_token_s is not None),
            default=None,
        )
        num_more = sum(choice.num_tokens for choice in self.choices) - 1
        decode_s = 0.0 if first_s is None else max(choice.times.last_token_s for choice in self.choices) - first_s
        return RequestTiming(
            queue_seconds=min(
                (choice.times.queue_s for choice in self.choices if choice.times.queue_s is not None), default=None
            ),
            time_to_first_token_seconds=None if first_s is None else first_s - begin_s,
            total_seconds=time.monotonic() - begin_s,
            tokens_per_second=num_more / decode_s if num_more > 0 and decode_s > 0 else None,
            weight_version=self.weight_version,
            weight_version_tokens=_by_version(self.choices) or None,
            choice_weight_version_tokens=None if first_s is None else [_by_version([each]) for each in self.choices],
        )

    @property
    def weight_version(self) -> int | None:
        """The version of the weights that computed the newest token; None before the first."""
        return max((version for choice in self.choices for version in choice.num_tokens_of_weights), default=None)

    @property
    def _stream(self) -> OutputStream:
        assert self._outputs is not None, "outputs are consumed inside the block"
        return self._outputs

    def _record_end(self) -> None:
        for choice in self.choices:
            choice.abandon()
        if self._outputs is not None:  # else the engine never got it
            counts = self.counts()
            for user in (self._tenant, self._usage):
                if user is not None:
                    user.use(counts.num_prompt, counts.num_completion)
        for i in range(0, len(self.choices), self._num_choices_per_prompt):
            group = self.choices[i : i + self._num_choices_per_prompt]
            self._frontend.metrics.observe(
                "request_max_num_generation_tokens", max(choice.num_tokens for choice in group)
            )


def _has_scores(request: AddRequest) -> bool:
    """Return True if replies have log-probabilities or experts, whose memory is reserved."""
    sampling = request.sampling
    is_scored = sampling.num_top_logprobs is not None or sampling.num_prompt_logprobs is not None
    return is_scored or request.returns_routed_experts


def _by_version(choices: Iterable[ChoiceStream]) -> dict[str, int]:
    """Return the number of tokens of each version of the weights that computed some, in ascending order."""
    counts: Counter[int] = Counter()
    for choice in choices:
        counts.update(choice.num_tokens_of_weights)
    return {str(version): counts[version] for version in sorted(+counts)}
