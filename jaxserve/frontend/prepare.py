"""From a GenerationRequest to the engine: checked, admitted, encoded, constrained and submitted."""

from __future__ import annotations

import uuid
from contextlib import AbstractContextManager, ExitStack
from typing import Final

from jaxserve.errors import ContextLengthError, invalid
from jaxserve.frontend.checks import shorten
from jaxserve.frontend.choice_stream import ChoiceStream, OutputOptions
from jaxserve.frontend.frontend import Frontend
from jaxserve.frontend.grammar import grammar_of
from jaxserve.frontend.handle import RequestHandle
from jaxserve.frontend.messages import content_text
from jaxserve.frontend.parsers.parser_spec import ParserSpec
from jaxserve.frontend.request import Conversation, GenerationRequest
from jaxserve.frontend.sampling import sampling_params
from jaxserve.frontend.seeds import child_seed
from jaxserve.frontend.tokenization import Tokenization, context_error
from jaxserve.ipc.messages import AddRequest, Grammar
from jaxserve.types import RequestId

_NUM_END_TOKENS: Final = 64
"""Number of tokens at the end of a prompt in which reasoning may open or close."""


async def submit(frontend: Frontend, request: GenerationRequest, cleanup: ExitStack) -> RequestHandle:
    """Submit the engine requests of `request`; closing `cleanup` aborts what still runs. Raises RequestError."""
    cleanup.enter_context(admitted(frontend, request))
    handle = await prepare(frontend, request)
    return cleanup.enter_context(handle)


def admitted(frontend: Frontend, request: GenerationRequest) -> AbstractContextManager[None]:
    """Check the request; return its place in the queue. Raises RequestError."""
    request.check(frontend.limits)
    frontend.require_generation(request.model)
    return frontend.client.admission(request.num_sequences)


async def prepare(frontend: Frontend, request: GenerationRequest) -> RequestHandle:
    """Return the engine requests of every prompt and choice, not yet submitted. Raises RequestError."""
    model_info, tokens = frontend.client.require_generation(), frontend.tokenization
    prompts = await encode(frontend, request)
    spec = parser_spec(tokens, request, prompts[0])
    grammar = await _grammar(frontend, request, spec)
    words = await tokens.encode_words(request.sampling)
    prediction = await tokens.encode_start(request.prediction, model_info.max_model_len) if request.prediction else []
    adapter = frontend.adapter_of(request.model)
    if adapter:
        frontend.metrics.inc("adapter_requests", adapter=frontend.shown_name(request.model))
    request_id = uuid.uuid4().hex
    choices: list[ChoiceStream] = []
    for prompt in prompts:
        max_tokens = _max_tokens(request, len(prompt), model_info.max_model_len)
        seed = frontend.seeds.draw() if request.sampling.seed is None else request.sampling.seed
        for child in range(request.n):
            sampling = sampling_params(
                request.sampling,
                model_info.sampling_defaults,
                max_tokens=max(1, max_tokens),  # a program runs for the prompt alone, too
                seed=child_seed(seed, child),
                num_top_logprobs=request.num_listed_logprobs,
                num_prompt_logprobs=request.num_prompt_logprobs,
                vocab_size=model_info.vocab_size,
                words=words,
            )
            add = AddRequest(
                RequestId(f"{request_id}-{len(choices)}"),
                prompt,
                sampling,
                request.priority,
                request.cache_salt,
                grammar,
                adapter=adapter,
                prediction_token_ids=prediction,
            )
            options = OutputOptions(
                stop=request.stop,
                include_stop=request.include_stop,
                skip_special_tokens=request.skip_special_tokens,
                is_prompt_only=max_tokens == 0,
                spec=spec,
            )
            choices.append(ChoiceStream(len(choices), add, options, frontend.metrics))
    frontend.metrics.observe("request_params_n", request.n)
    return RequestHandle(
        choices,
        request.n,
        model_info=model_info,
        client=frontend.client,
        tokenizer=tokens.tokenizer,
        metrics=frontend.metrics,
    )


async def encode(frontend: Frontend, request: GenerationRequest) -> list[list[int]]:
    """Return the token ids of each prompt. Raises InvalidRequestError or ContextLengthError."""
    model_info, prompt = frontend.client.require_generation(), request.prompt
    if isinstance(prompt, Conversation):
        prompts = [await frontend.tokenization.encode_conversation(prompt, model_info.max_model_len)]
    else:
        prompts = await frontend.tokenization.encode_texts(prompt, model_info.vocab_size, model_info.max_model_len)
    if not all(prompts):
        raise invalid(request.prompt_name, "it has no tokens")
    return prompts


def parser_spec(tokens: Tokenization, request: GenerationRequest, prompt: list[int]) -> ParserSpec:
    """Return the parser of the replies to this prompt, as data."""
    conversation, output_format = request.prompt, tokens.output_format
    if not isinstance(conversation, Conversation):
        return ParserSpec()
    tools = {function.name: function.parameters or {} for _, function in conversation.offered}
    end = prompt[-_NUM_END_TOKENS:] if output_format.has_reasoning else []
    return ParserSpec(
        output_format=output_format,
        tools=tools,
        prompt_end=tokens.tokenizer.decode(end, skip_special_tokens=False),
        continued=content_text(conversation.messages[-1]) if conversation.continue_final_message else None,
        shown_token_ids=tokens.shown_token_ids(with_tools=bool(tools)),
        max_calls=None if conversation.is_parallel else 1,
    )


async def _grammar(frontend: Frontend, request: GenerationRequest, spec: ParserSpec) -> Grammar | None:
    checker = frontend.grammars
    named = grammar_of(request, spec, frontend.tokenization.tokenizer, checker.config.max_grammar_depth)
    if named is None:
        return None
    await checker.check(named.grammar, named.param)
    return named.grammar


def _max_tokens(request: GenerationRequest, num_prompt: int, limit: int) -> int:
    """Return the number of tokens that may be generated. Raises ContextLengthError if they do not fit `limit`."""
    asked, left, name = request.max_tokens, limit - num_prompt, request.prompt_name
    if left < 1:
        raise context_error(limit, str(num_prompt), name)
    if asked is None or asked <= left:
        return left if asked is None else asked
    if request.is_limit_clipped:
        return left
    raise ContextLengthError(
        f"This model's maximum context length is {limit} tokens. However, you requested "
        f"{shorten(num_prompt + asked)} tokens ({num_prompt} in the {name}, {shorten(asked)} in the completion). "
        f"Please reduce the length of the {name} or completion.",
        param=name,
    )
