"""From a checked request to the engine and back: one job per HTTP request, streamed or not."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from aiohttp import web

from jaxserve.apis.schema.common import CommonFields, GenerationFields, resolve_max_tokens
from jaxserve.apis.schema.timing import RequestTiming
from jaxserve.apis.schema.usage import Usage, make_usage
from jaxserve.errors import RequestError, invalid, unsupported
from jaxserve.frontend.choice_stream import ChoiceStream, OutputDelta, deltas_of
from jaxserve.frontend.engine_client.output_stream import OutputStream
from jaxserve.frontend.grammars.constraint import NamedGrammar, requested_grammar
from jaxserve.frontend.grammars.thinking import after_thinking
from jaxserve.frontend.parsers.parser_spec import ParserSpec
from jaxserve.frontend.sampling import sampling_params
from jaxserve.frontend.seeds import child_seed
from jaxserve.http.errors import hide_internal_error
from jaxserve.http.request_id import request_id_of
from jaxserve.http.sse import EventStream, Framing, frame
from jaxserve.http.state import STATE, ServerState
from jaxserve.ipc.messages import AddRequest, Grammar, ModelInfo, RequestOutput
from jaxserve.tokenizer.detokenizer import IncrementalDetokenizer
from jaxserve.types import RequestId


@dataclass(slots=True)
class Job:
    """The choices of one HTTP request, prompt by prompt, `n` each."""

    choices: list[ChoiceStream]
    num_choices_per_prompt: int

    @property
    def requests(self) -> list[AddRequest]:
        return [choice.request for choice in self.choices]

    @property
    def choices_by_id(self) -> dict[RequestId, ChoiceStream]:
        return {choice.request.request_id: choice for choice in self.choices}

    @property
    def is_scored(self) -> bool:
        """Whether the log-probabilities of whole prompts come back."""
        return any(request.sampling.num_prompt_logprobs is not None for request in self.requests)

    def usage(self) -> Usage:
        """Counts so far: each prompt once, the completions of all choices."""
        firsts = self.choices[:: self.num_choices_per_prompt]
        return make_usage(
            num_prompt=sum(choice.num_prompt_tokens for choice in firsts),
            num_completion=sum(choice.num_tokens for choice in self.choices),
            num_cached=sum(choice.num_cached_tokens for choice in firsts),
            num_reasoning=sum(choice.num_reasoning_tokens for choice in self.choices),
            num_accepted=sum(choice.num_accepted_tokens for choice in self.choices),
            num_rejected=sum(choice.num_rejected_tokens for choice in self.choices),
        )

    def timing(self) -> RequestTiming:
        """What it took so far."""
        begin_s = min(choice.submitted_s for choice in self.choices)
        first_s = min(
            (choice.first_token_s for choice in self.choices if choice.first_token_s is not None), default=None
        )
        num_more = sum(choice.num_tokens for choice in self.choices) - 1
        decode_s = 0.0 if first_s is None else max(choice.last_token_s for choice in self.choices) - first_s
        return RequestTiming(
            queue_seconds=min((choice.queue_s for choice in self.choices if choice.queue_s is not None), default=None),
            time_to_first_token_seconds=None if first_s is None else first_s - begin_s,
            total_seconds=time.monotonic() - begin_s,
            tokens_per_second=num_more / decode_s if num_more > 0 and decode_s > 0 else None,
        )

    def told_timing(self, request: GenerationFields) -> RequestTiming | msgspec.UnsetType:
        """The same for a reply, where the request asks for it."""
        return self.timing() if request.return_metrics else msgspec.UNSET


class ReplyFormat(Protocol):
    """How an endpoint spells its chunks and its reply."""

    @property
    def framing(self) -> Framing:
        """What stands between the chunks of a stream and at its end."""
        ...

    def opening(self) -> list[msgspec.Struct]:
        """Chunks before the first piece."""
        ...

    def chunks(self, piece: OutputDelta, usage: Usage | None) -> Sequence[msgspec.Struct]:
        """The chunks of one piece; `usage` when every chunk is to carry it."""
        ...

    def closing(self, usage: Usage) -> Sequence[msgspec.Struct]:
        """Chunks behind the last piece."""
        ...

    def reply(self, choices: list[list[OutputDelta]], usage: Usage) -> msgspec.Struct:
        """The whole reply, from the pieces of each choice."""
        ...


def make_job(
    state: ServerState,
    model_info: ModelInfo,
    request: CommonFields,
    prompts: Sequence[list[int]],
    *,
    asked_max_tokens: int | None,
    default_max_tokens: int | None,
    num_top_logprobs: int | None,
    words: Mapping[str, Sequence[Sequence[int]]],
    param: str,
    spec: ParserSpec | None = None,
    grammar: Grammar | None = None,
    prediction: Sequence[int] = (),
) -> Job:
    """Engine requests for every prompt and choice. Raises InvalidRequestError or ContextLengthError."""
    job_id, adapter = uuid.uuid4().hex, state.adapter_of(request.model)
    if adapter:
        state.metrics.inc("adapter_requests", adapter=state.shown_name(request.model))
    choices: list[ChoiceStream] = []
    for prompt in prompts:
        if not prompt:
            raise invalid(param, "it has no tokens")
        max_tokens = resolve_max_tokens(
            asked_max_tokens, default_max_tokens, len(prompt), model_info.max_model_len, param
        )
        seed = state.seeds.draw() if request.seed is None else request.seed
        for child in range(request.num_choices):
            sampling = sampling_params(
                request,
                model_info.sampling_defaults,
                max_tokens=max(1, max_tokens),  # a program has to run for the prompt alone, too
                seed=child_seed(seed, child),
                num_top_logprobs=num_top_logprobs,
                num_prompt_logprobs=request.num_prompt_logprobs,
                vocab_size=model_info.vocab_size,
                words=words,
            )
            add = AddRequest(
                RequestId(f"{job_id}-{len(choices)}"),
                prompt,
                sampling,
                request.priority or 0,
                request.cache_salt,
                grammar,
                adapter=adapter,
                prediction_token_ids=list(prediction),
            )
            choice = _choice(state, len(choices), add, request, spec or ParserSpec())
            choice.is_prompt_only = max_tokens == 0
            choices.append(choice)
    state.metrics.observe("request_params_n", request.num_choices)
    return Job(choices, request.num_choices)


def _choice(state: ServerState, index: int, add: AddRequest, request: CommonFields, spec: ParserSpec) -> ChoiceStream:
    include_stop = bool(request.include_stop_str_in_output)
    detokenizer = IncrementalDetokenizer(
        state.tokenization.tokenizer,
        add.prompt_token_ids,
        request.stop_strings,
        skip_special_tokens=request.skip_special_tokens is not False,
        shown_token_ids=spec.shown_token_ids,
        include_stop=include_stop,
        min_tokens=add.sampling.min_tokens,
    )
    parser = spec.new_parser()
    return ChoiceStream(
        index,
        add,
        detokenizer,
        parser=parser,
        max_calls=spec.max_calls,
        include_stop=include_stop,
        metrics=state.metrics,
    )


async def grammar_of(
    state: ServerState,
    request: CommonFields,
    spec: ParserSpec | None = None,
    calls: NamedGrammar | None = None,
    thinking_budget: int | None = None,
) -> Grammar | None:
    """What the request holds its replies to, checked. Raises InvalidRequestError for what cannot be enforced.

    calls: what it holds its calls to; thinking_budget: tokens after which reasoning is ended.
    """
    max_depth = state.grammars.config.max_grammar_depth
    named = requested_grammar(request.response_format, request.structured_outputs, max_depth)
    if named is not None and spec is not None and spec.tools:
        raise unsupported(named.param, "is not supported together with tools")
    named = named or calls
    if spec is not None:
        named = after_thinking(state.tokenization, spec, named, thinking_budget)
    if named is None:
        return None
    await state.grammars.check(named.grammar, named.param)
    return named.grammar


async def answer(http: web.Request, request: CommonFields, job: Job, spelling: ReplyFormat) -> web.StreamResponse:
    """Run the job and reply. A client that leaves ends its job within one engine step."""
    state = http.app[STATE]
    try:
        with generating(state, job) as generation:
            if request.stream:
                return await _stream(http, request, job, spelling, generation)
            return await _collect(job, spelling, generation)
    except (asyncio.CancelledError, ConnectionResetError):
        state.metrics.inc("client_disconnects")
        raise


@contextlib.contextmanager
def generating(state: ServerState, job: Job) -> Iterator[OutputStream]:
    """The job's news inside the block, whose end ends the job."""
    try:
        with state.client.submit(job.requests) as generation:
            yield generation
    finally:
        for choice in job.choices:
            choice.abandon()
        for i in range(0, len(job.choices), job.num_choices_per_prompt):
            group = job.choices[i : i + job.num_choices_per_prompt]
            state.metrics.observe("request_max_num_generation_tokens", max(choice.num_tokens for choice in group))


async def answer_without_engine(
    http: web.Request, request: CommonFields, pieces: Sequence[OutputDelta], usage: Usage, spelling: ReplyFormat
) -> web.StreamResponse:
    """Reply with pieces that need no generation, one per choice."""
    if not request.stream:
        reply = spelling.reply([[piece] for piece in pieces], usage)
        return web.Response(body=msgspec.json.encode(reply), content_type="application/json")
    events = EventStream(http)
    chunks = [chunk for piece in pieces for chunk in spelling.chunks(piece, None)]
    await events.close([*map(frame, [*spelling.opening(), *chunks, *spelling.closing(usage)]), spelling.framing.end])
    return events.response


async def take_deltas(job: Job, generation: OutputStream, take: Callable[[OutputDelta], object]) -> None:
    """Give every piece of every choice to `take`."""
    choices = job.choices_by_id

    def take_news(news: list[RequestOutput]) -> bool:
        for piece in deltas_of(news, choices, generation):
            take(piece)
        return True

    while not generation.is_finished:
        await generation.consume(take_news)


async def _collect(job: Job, spelling: ReplyFormat, generation: OutputStream) -> web.Response:
    collected: list[list[OutputDelta]] = [[] for _ in job.choices]
    await take_deltas(job, generation, lambda piece: collected[piece.index].append(piece))

    def spell() -> bytes:
        return msgspec.json.encode(spelling.reply(collected, job.usage()))

    # A long prompt's log-probabilities take seconds to spell, in which others want to be heard.
    body = await asyncio.to_thread(spell) if job.is_scored else spell()
    return web.Response(body=body, content_type="application/json")


async def _stream(
    http: web.Request, request: CommonFields, job: Job, spelling: ReplyFormat, generation: OutputStream
) -> web.StreamResponse:
    events = EventStream(http)
    framing = spelling.framing
    choices = job.choices_by_id
    frames = [frame(chunk) for chunk in spelling.opening()]

    def show(news: list[RequestOutput]) -> bool:
        pieces = deltas_of(news, choices, generation)
        usage = job.usage() if request.wants_continuous_usage else None
        frames.extend([frame(chunk) for piece in pieces for chunk in spelling.chunks(piece, usage)])
        if events.has_room and frames and not generation.is_finished:
            events.push(frames)
            frames.clear()
        return events.has_room

    try:
        while not generation.is_finished:
            if not await generation.consume(show, http.app[STATE].keep_alive_s):
                frames.append(framing.keep_alive)
            if not generation.is_finished:  # else the last text leaves with the end
                await events.send(frames)
                frames.clear()
        await events.close([*frames, *map(frame, spelling.closing(job.usage())), framing.end])
    except (asyncio.CancelledError, ConnectionResetError):
        raise
    except Exception as error:
        if not events.has_started:
            raise
        shown = error if isinstance(error, RequestError) else hide_internal_error(error, request_id_of(http))
        await events.close([frame(framing.error(shown)), framing.end])
    return events.response
