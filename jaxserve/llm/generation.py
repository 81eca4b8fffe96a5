"""From prompts and conversations to the results of the Python API."""

from __future__ import annotations

import asyncio
import base64
import io
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from PIL import Image

from jaxserve.bounds import Bound
from jaxserve.errors import RequestError, invalid
from jaxserve.frontend.checks import check_bounds, invalid_field
from jaxserve.frontend.choices.choice_stream import ChoiceStream, OutputDelta
from jaxserve.frontend.choices.content_tokens import ScoredToken
from jaxserve.frontend.choices.parsed_reply import parsed_reply
from jaxserve.frontend.constraints import StructuredOutputs, structured_constraint
from jaxserve.frontend.errors import first_leaf
from jaxserve.frontend.frontend import Frontend
from jaxserve.frontend.handle import RequestHandle
from jaxserve.frontend.images.decode import upright
from jaxserve.frontend.messages import ChatMessage, ToolChoice, ToolDefinition, read_images, read_tools
from jaxserve.frontend.prepare import prepare
from jaxserve.frontend.prompt_embeds.prompt import EmbedsSource
from jaxserve.frontend.request import Conversation, GenerationRequest, Texts
from jaxserve.frontend.sampling import SamplerFields
from jaxserve.ipc.messages import AddRequest, ModelInfo
from jaxserve.ipc.messages import RequestOutput as EngineOutput
from jaxserve.llm.prompts import check_text
from jaxserve.llm.results import CompletionOutput, Logprob, RequestOutput, ToolCall
from jaxserve.llm.sampling_params import SamplingParams
from jaxserve.scheduler.admission import Admission
from jaxserve.tokenizer.tokenizer import Tokenizer

T = TypeVar("T", bound=msgspec.Struct)


class _Options(SamplerFields, kw_only=True):
    """The fields of SamplingParams with their types and bounds."""

    n: Annotated[int, Bound("value", 1, "max_choices")] = 1
    max_tokens: Annotated[int | None, Bound("value", 1)] = None
    stop: Annotated[
        str | list[str] | None, Bound("items", 0, "max_stop_strings"), Bound("characters", 1, "max_stop_chars")
    ] = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: Annotated[int | None, Bound("value", 0, "max_top_logprobs")] = None
    prompt_logprobs: Annotated[int | None, Bound("value", 0, "max_top_logprobs")] = None
    return_routed_experts: bool = False
    structured_outputs: StructuredOutputs | None = None


class _ChatOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The arguments of `LLM.chat` that make the prompt."""

    messages: list[ChatMessage]
    tools: Annotated[list[ToolDefinition] | None, Bound("items", 0, "max_tools")] = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """One prompt, checked and prepared: the engine has no reason to reject it."""

    prompt: str | None
    handle: RequestHandle
    num_top_logprobs: int | None
    num_prompt_logprobs: int | None


async def text_work(
    frontend: Frontend, prompt: str | list[int] | EmbedsSource, params: SamplingParams, *, adapter: str | None = None
) -> Work:
    """Return the work of a prompt without a template. Raises RequestError for options, prompts and lengths that are out of range."""
    if not prompt:
        raise invalid("prompt", "must not be empty")
    request = _request(frontend, Texts(prompts=[prompt]), params, adapter)
    return await _work(frontend, request, prompt if isinstance(prompt, str) else None)


async def chat_work(
    frontend: Frontend,
    messages: list[dict[str, Any]],
    params: SamplingParams,
    *,
    adapter: str | None = None,
    **template: Any,
) -> Work:
    """Return the work of a conversation; `template`: further arguments of `LLM.chat`, such as `tools`."""
    options = _converted(_ChatOptions, {"messages": await with_image_urls(messages), **template})
    check_bounds(options, frontend.limits)
    conversation = Conversation(
        messages=options.messages,
        functions=read_tools(options.tools),
        tool_choice=ToolChoice.read(options.tool_choice),
        template_variables=options.chat_template_kwargs or {},
        continue_final_message=options.continue_final_message,
        images=read_images(options.messages),
    )
    work = await _work(frontend, _request(frontend, conversation, params, adapter), None)
    token_ids = work.handle.requests[0].prompt_token_ids
    prompt = await frontend.tokenization.decode(token_ids, skip_special_tokens=False)
    return Work(prompt, work.handle, work.num_top_logprobs, work.num_prompt_logprobs)


async def with_image_urls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with Pillow's images (parts of type `image_pil`) as `data:` URLs. Raises InvalidRequestError."""

    def converted(message: Any, place: str) -> Any:
        if not isinstance(message, dict) or not isinstance(message.get("content"), list):
            return message
        parts = [_with_url(part, f"{place}.content[{i}]") for i, part in enumerate(message["content"])]
        return message | {"content": parts}

    return await asyncio.to_thread(lambda: [converted(each, f"messages[{i}]") for i, each in enumerate(messages)])


def _with_url(part: Any, place: str) -> Any:
    if not isinstance(part, dict) or part.get("type") != "image_pil":
        return part
    image: Any = part.get("image_pil")
    buffer = io.BytesIO()
    if not isinstance(image, Image.Image):
        raise invalid(f"{place}.image_pil", "must be an image of Pillow")
    try:
        upright(image).save(buffer, "PNG")
    except (OSError, ValueError, AssertionError) as error:  # another mode; a file that is damaged, or closed
        reason = str(error) or "its file is closed"
        raise invalid(f"{place}.image_pil", f"must be an open image of a mode that PNG has: {reason}") from None
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"},
    }


def _request(
    frontend: Frontend, prompt: Conversation | Texts, params: SamplingParams, adapter: str | None
) -> GenerationRequest:
    """Translate the options. Raises InvalidRequestError."""
    options = _converted(_Options, params.request_fields())
    check_bounds(options, frontend.limits)
    request = GenerationRequest(
        prompt=prompt,
        model=adapter,
        sampling=options,
        n=options.n,
        max_tokens=options.max_tokens,
        num_top_logprobs=options.logprobs,
        num_prompt_logprobs=options.prompt_logprobs,
        stop=[options.stop] if isinstance(options.stop, str) else options.stop or (),
        include_stop=options.include_stop_str_in_output,
        skip_special_tokens=options.skip_special_tokens,
        returns_routed_experts=options.return_routed_experts,
        constraint=structured_constraint(options.structured_outputs),
    )
    request.check(frontend.limits)
    return request


async def _work(frontend: Frontend, request: GenerationRequest, prompt: str | None) -> Work:
    model_info = frontend.require_generation(request.model)
    handle = await prepare(frontend, request)
    _check_fits(model_info, handle.requests[0])
    return Work(prompt, handle, request.num_listed_logprobs, request.num_prompt_logprobs)


def _converted(kind: type[T], fields: Mapping[str, Any]) -> T:
    """Return the fields as a struct; raises InvalidRequestError for a wrong type, and for text that no message can hold."""
    try:
        converted = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise invalid_field(str(error), struct=kind) from None
    for name in fields.keys() - {"messages"}:  # their text is checked when it is encoded
        check_text(getattr(converted, name), name)
    return converted


async def run_all(frontend: Frontend, works: Sequence[Work], on_done: Callable[[], None]) -> list[RequestOutput]:
    """Return results in the order of `works`. An engine that fails ends all of them with its RequestError."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_run(frontend, work, on_done)) for work in works]
    except* RequestError as errors:
        failure = first_leaf(errors)
    else:
        return [task.result() for task in tasks]
    raise failure


async def _run(frontend: Frontend, work: Work, on_done: Callable[[], None]) -> RequestOutput:
    handle = work.handle
    deltas: list[list[OutputDelta]] = [[] for _ in handle.choices]
    token_ids: defaultdict[str, list[int]] = defaultdict(list)

    def gather(outputs: list[EngineOutput]) -> bool:
        for output in outputs:
            token_ids[output.request_id] += output.token_ids
        for delta in handle.deltas(outputs):
            deltas[delta.index].append(delta)
        return True

    with handle:
        while not handle.is_finished:
            await handle.consume(gather)
    first = handle.choices[0]
    tokenizer = frontend.tokenization.tokenizer
    num_top = work.num_prompt_logprobs
    result = RequestOutput(
        prompt=work.prompt,
        prompt_token_ids=[] if first.request.prompt_embeds else first.request.prompt_token_ids,
        outputs=[
            _output(frontend, choice, deltas[choice.index], token_ids[choice.request.request_id], work.num_top_logprobs)
            for choice in handle.choices
        ],
        prompt_logprobs=None
        if num_top is None
        else [None if token.scores is None else _entry(tokenizer, token, num_top) for token in deltas[0][0].prompt],
        num_cached_tokens=first.num_cached_tokens,
    )
    on_done()
    return result


def _output(
    frontend: Frontend, choice: ChoiceStream, deltas: list[OutputDelta], token_ids: list[int], num_top: int | None
) -> CompletionOutput:
    tokenizer, end = frontend.tokenization.tokenizer, deltas[-1]
    scored = [token for delta in deltas for token in delta.tokens]
    new_call_id = frontend.tokenization.output_format.new_call_id
    reply = parsed_reply(deltas)
    versions = [version for version, count in choice.num_tokens_of_weights.items() for _ in range(count)]
    return CompletionOutput(
        index=choice.index,
        text=reply.content,
        token_ids=token_ids[: choice.num_tokens],
        finish_reason="tool_calls" if reply.calls and end.finish_reason == "stop" else end.finish_reason or "stop",
        stop_reason=end.stop_reason,
        cumulative_logprob=None if num_top is None else sum(token.logprob or 0.0 for token in scored),
        logprobs=None if num_top is None else [_entry(tokenizer, token, num_top) for token in scored],
        weight_versions=versions,
        routed_experts=end.routed_experts,
        reasoning=reply.reasoning or None,
        tool_calls=tuple(ToolCall(new_call_id(), call.name, call.arguments) for call in reply.calls),
    )


def replayed(result: RequestOutput, num_prompt_tokens: int) -> list[float]:
    """Return the log-probabilities of the tokens of a scored prompt after its first ones."""
    assert result.prompt_logprobs is not None, "the prompt was scored"
    later = zip(result.prompt_token_ids[num_prompt_tokens:], result.prompt_logprobs[num_prompt_tokens:], strict=True)
    return [entry[token].logprob for token, entry in later if entry is not None]


def _entry(tokenizer: Tokenizer, token: ScoredToken, num_top: int) -> dict[int, Logprob]:
    """Return the token itself first, then the others, each with its rank if it is known."""
    top = token.alternatives(num_top)
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(top, start=1)}
    own_rank = token.scores.rank if token.scores is not None and token.scores.rank else ranks.get(token.token_id)
    entry = {token.token_id: Logprob(token.logprob or 0.0, own_rank, tokenizer.token_text(token.token_id))}
    for token_id, logprob in top:
        entry.setdefault(token_id, Logprob(logprob, ranks[token_id], tokenizer.token_text(token_id)))
    return entry


def _check_fits(model_info: ModelInfo, request: AddRequest) -> None:
    """Raise the engine's error for a request that the whole KV cache cannot hold, before anything runs."""
    admission = Admission(
        max_model_len=model_info.max_model_len,
        vocab_size=model_info.vocab_size,
        num_usable_tokens=(model_info.num_kv_blocks - 1) * model_info.block_size,  # block 0 is the null block
        max_requests=1,
        has_grammars=True,
        images=model_info.images,
        prompt_embeds=model_info.prompt_embeds,
        returns_routed_experts=model_info.routed_experts is not None,
    )
    error = admission.rejection(request, 0)
    if error is not None:
        raise error
