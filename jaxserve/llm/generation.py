"""Prompts to jobs for the engine, and the jobs to results: what an endpoint does with a request, without HTTP."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from jaxserve.apis.openai.chat_schema import ChatRequest, check_chat
from jaxserve.apis.openai.completions_schema import CompletionRequest, check_completion
from jaxserve.apis.openai.deltas import MessageDeltas, message_of
from jaxserve.apis.openai.logprobs import ScoredToken
from jaxserve.apis.schema.common import CommonFields
from jaxserve.apis.schema.decode import invalid_field
from jaxserve.errors import RequestError
from jaxserve.frontend.choice_stream import ChoiceStream, OutputDelta, deltas_of, events_of
from jaxserve.frontend.handle import Job, generating, grammar_of, make_job
from jaxserve.frontend.prepare import make_chat_job
from jaxserve.http.errors import first_leaf
from jaxserve.http.state import ServerState
from jaxserve.ipc.messages import AddRequest, ModelInfo
from jaxserve.ipc.messages import RequestOutput as News
from jaxserve.llm.results import CompletionOutput, Logprob, RequestOutput, ToolCall
from jaxserve.llm.sampling_params import SamplingParams
from jaxserve.scheduler.admission import Admission
from jaxserve.tokenizer.tokenizer import Tokenizer

T = TypeVar("T", bound=CommonFields)


@dataclass(frozen=True, slots=True)
class Work:
    """One prompt, checked: nothing of it is the engine's to refuse."""

    prompt: str | None
    job: Job
    num_top_logprobs: int | None
    num_prompt_logprobs: int | None


async def text_work(
    state: ServerState, prompt: str | list[int], params: SamplingParams, *, adapter: str | None = None
) -> Work:
    """The work of a plain prompt. Raises RequestError for options, prompts and lengths that are out of range."""
    model_info, tokens = state.client.require_generation(), state.tokenization
    state.require_model(adapter)
    request = _request(CompletionRequest, params, prompt=prompt, logprobs=params.logprobs, model=adapter)
    check_completion(request, state.limits)
    if isinstance(prompt, str):
        token_ids = await tokens.encode(
            prompt, add_special_tokens=True, max_tokens=model_info.max_model_len, param="prompt"
        )
    else:
        token_ids = tokens.check_ids(prompt, model_info.vocab_size, model_info.max_model_len, "prompt")
    job = make_job(
        state,
        model_info,
        request,
        [token_ids],
        asked_max_tokens=request.max_tokens,
        default_max_tokens=None,
        num_top_logprobs=request.num_top_logprobs,
        words=await tokens.encode_words(request),
        param="prompt",
        grammar=await grammar_of(state, request),
    )
    _check_room(model_info, job.requests[0])
    shown = prompt if isinstance(prompt, str) else None
    return Work(shown, job, request.num_top_logprobs, request.num_prompt_logprobs)


async def chat_work(
    state: ServerState,
    messages: list[dict[str, Any]],
    params: SamplingParams,
    *,
    adapter: str | None = None,
    **template: Any,
) -> Work:
    """The work of a conversation; `template`: what ChatRequest says of the prompt, such as `tools`."""
    model_info = state.client.require_generation()
    state.require_model(adapter)
    logprobs = {} if params.logprobs is None else {"logprobs": True, "top_logprobs": params.logprobs}
    request = _request(ChatRequest, params, messages=messages, model=adapter, **logprobs, **template)
    check_chat(request, state.limits)
    job = await make_chat_job(state, model_info, request)
    _check_room(model_info, job.requests[0])
    token_ids = job.requests[0].prompt_token_ids
    prompt = await state.tokenization.decode(token_ids, skip_special_tokens=False)
    return Work(prompt, job, request.num_top_logprobs, request.num_prompt_logprobs)


async def run_all(state: ServerState, works: Sequence[Work], on_done: Callable[[], None]) -> list[RequestOutput]:
    """Results in the order of `works`. An engine that fails ends all of them with its RequestError."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_run(state, work, on_done)) for work in works]
    except* RequestError as errors:
        failure = first_leaf(errors)
    else:
        return [task.result() for task in tasks]
    raise failure


async def _run(state: ServerState, work: Work, on_done: Callable[[], None]) -> RequestOutput:
    job = work.job
    choices = job.choices_by_id
    pieces: list[list[OutputDelta]] = [[] for _ in job.choices]
    token_ids: defaultdict[str, list[int]] = defaultdict(list)

    def gather(news: list[News]) -> bool:
        for output in news:
            token_ids[output.request_id] += output.token_ids
        for piece in deltas_of(news, choices, generation):
            pieces[piece.index].append(piece)
        return True

    with generating(state, job) as generation:
        while not generation.is_finished:
            await generation.consume(gather)
    first = job.choices[0]
    tokenizer = state.tokenization.tokenizer
    num_top = work.num_prompt_logprobs
    result = RequestOutput(
        prompt=work.prompt,
        prompt_token_ids=first.request.prompt_token_ids,
        outputs=[
            _output(state, choice, pieces[choice.index], token_ids[choice.request.request_id], work.num_top_logprobs)
            for choice in job.choices
        ],
        prompt_logprobs=None
        if num_top is None
        else [None if token.scores is None else _spell(tokenizer, token, num_top) for token in pieces[0][0].prompt],
        num_cached_tokens=first.num_cached_tokens,
    )
    on_done()
    return result


def _output(
    state: ServerState, choice: ChoiceStream, pieces: list[OutputDelta], token_ids: list[int], num_top: int | None
) -> CompletionOutput:
    tokenizer, end = state.tokenization.tokenizer, pieces[-1]
    scored = [token for piece in pieces for token in piece.tokens]
    new_call_id = state.tokenization.output_format.new_call_id
    message = message_of(MessageDeltas(new_call_id, shows_reasoning=True).of(events_of(pieces)))
    calls = () if message.tool_calls is msgspec.UNSET else message.tool_calls
    return CompletionOutput(
        index=choice.index,
        text=message.content or "",
        token_ids=token_ids[: choice.num_tokens],
        finish_reason="tool_calls" if calls and end.finish_reason == "stop" else end.finish_reason or "stop",
        stop_reason=end.stop_reason,
        cumulative_logprob=None if num_top is None else sum(token.logprob or 0.0 for token in scored),
        logprobs=None if num_top is None else [_spell(tokenizer, token, num_top) for token in scored],
        reasoning=None if message.reasoning is msgspec.UNSET else message.reasoning,
        tool_calls=tuple(ToolCall(call.id, call.function.name, call.function.arguments) for call in calls),
    )


def _spell(tokenizer: Tokenizer, token: ScoredToken, num_top: int) -> dict[int, Logprob]:
    """The token itself first, then the others, each with its rank where it is known."""
    top = token.alternatives(num_top)
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(top, start=1)}
    own_rank = token.scores.rank if token.scores is not None and token.scores.rank else ranks.get(token.token_id)
    entry = {token.token_id: Logprob(token.logprob or 0.0, own_rank, tokenizer.token_text(token.token_id))}
    for token_id, logprob in top:
        entry.setdefault(token_id, Logprob(logprob, ranks[token_id], tokenizer.token_text(token_id)))
    return entry


def _request(kind: type[T], params: SamplingParams, **fields: Any) -> T:
    """The body of a request with these options, checked as one; raises InvalidRequestError for a wrong type."""
    try:
        return msgspec.convert(params.request_fields() | fields, kind)
    except msgspec.ValidationError as error:
        raise invalid_field(str(error), struct=kind) from None


def _check_room(model_info: ModelInfo, request: AddRequest) -> None:
    """Ask before anything runs what the engine would ask: is the KV cache large enough for this request alone?"""
    admission = Admission(
        max_model_len=model_info.max_model_len,
        vocab_size=model_info.vocab_size,
        num_usable_tokens=(model_info.num_kv_blocks - 1) * model_info.block_size,  # block 0 is the null block
        max_requests=1,
        has_grammars=True,
    )
    error = admission.rejection(request, 0)
    if error is not None:
        raise error
