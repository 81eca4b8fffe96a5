"""From a GenerationRequest to engine requests: encoded, constrained, with sampling parameters and seeds."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import partial
from typing import Final

from jaxserve.errors import invalid
from jaxserve.frontend.choices.choice_stream import ChoiceStream, OutputOptions
from jaxserve.frontend.encode import EncodedRequest, encode_request
from jaxserve.frontend.engine_client.output_stream import PromptPages
from jaxserve.frontend.frontend import Frontend
from jaxserve.frontend.grammar import grammar_of
from jaxserve.frontend.handle import RequestHandle
from jaxserve.frontend.images.loader import NO_IMAGES
from jaxserve.frontend.images.prompt import prompt_images
from jaxserve.frontend.parsers.output_format import ParserSpec
from jaxserve.frontend.prompt_embeds.prompt import EmbedsSource, LoadedEmbeds, load_embeds, require_embeds
from jaxserve.frontend.request import Conversation, GenerationRequest, Texts
from jaxserve.frontend.routed_experts import check_size, require_routed_experts
from jaxserve.frontend.sampling import child_seed, sampling_params
from jaxserve.ipc.messages import AddRequest, ModelInfo
from jaxserve.ipc.prompt_images import PromptImage
from jaxserve.ipc.routed_experts import RoutedExpertsInfo
from jaxserve.routing.request import prompt_hashes
from jaxserve.tenants import HTTP_REQUEST_ID, TENANT
from jaxserve.types import RequestId

_TOKENS_HASHED_ON_LOOP: Final = 4096
"""Tokens of prompts whose pages are hashed on the event loop: a third of a millisecond."""


async def prepare(frontend: Frontend, request: GenerationRequest) -> RequestHandle:
    """Return the engine requests of every prompt and choice; entering the handle submits them. Raises RequestError."""
    model_info, tokens, checker = frontend.require_generation(), frontend.tokenization, frontend.grammars
    _check_logprobs_mode(request, model_info)
    images, placed, rope_positions = NO_IMAGES, list[PromptImage](), None
    if isinstance(request.prompt, Conversation) and request.prompt.images:
        images = await frontend.images.load(request.prompt.images, model_info.images)
    embeds = await _load_embeds(frontend, request, model_info)
    encoded = await encode_request(tokens, request, model_info, images, embeds)
    routed = _routed_experts(request, model_info, encoded)
    if images.images and model_info.images is not None:
        placed, rope_positions = prompt_images(encoded.prompts[0], images, model_info.images, request.prompt_name)
    grammar = None
    if request.is_constrained:
        find = partial(grammar_of, request, encoded.spec, tokens.tokenizer, checker.config)
        if (named := await tokens.call(find)) is not None:
            grammar = await checker.check(named.grammar, named.param)
    adapter = frontend.adapter_of(request.model)
    if adapter:
        frontend.metrics.inc("adapter_requests", adapter=frontend.shown_name(request.model))
    tenant, salt, priority = TENANT.get(), request.cache_salt, request.priority or 0
    if tenant is not None:
        salt, priority = tenant.salt(salt), tenant.priority(request.priority)
    request_id = f"{HTTP_REQUEST_ID.get()}:{uuid.uuid4().hex[:12]}"  # the client's id need not be unique
    choices: list[ChoiceStream] = []
    for index, (prompt, max_tokens) in enumerate(zip(encoded.prompts, encoded.max_tokens, strict=True)):
        options = _output_options(request, max_tokens, encoded.spec, routed)
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
                words=encoded.words,
            )
            add = AddRequest(
                RequestId(f"{request_id}-{len(choices)}"),
                prompt,
                sampling,
                priority,
                salt,
                grammar,
                adapter=adapter,
                prediction_token_ids=encoded.prediction,
                key_name="" if tenant is None else tenant.record.name,
                images=placed,
                rope_positions=rope_positions,
                prompt_embeds=embeds[index].parts if index in embeds else [],
                returns_routed_experts=routed is not None,
            )
            choices.append(ChoiceStream(len(choices), add, options, frontend.metrics))
    frontend.metrics.observe("request_params_n", request.n)
    inputs = (images, *embeds.values())
    pages = await _prompt_pages(frontend, [choice.request for choice in choices[:: request.n]], model_info.block_size)
    return RequestHandle(choices, request.n, model_info, frontend, notes=encoded.notes, inputs=inputs, pages=pages)


async def _prompt_pages(frontend: Frontend, requests: Sequence[AddRequest], block_size: int) -> PromptPages:
    """Return the pages of prompts by which they are routed, hashed in a thread; none if that is short work, or needless."""
    num_tokens = sum(len(request.prompt_token_ids) for request in requests)
    if not frontend.client.hashes_pages or num_tokens <= _TOKENS_HASHED_ON_LOOP:
        return {}

    def hash_all() -> PromptPages:
        return {
            id(each.prompt_token_ids): prompt_hashes(each.prompt_token_ids, block_size, each.cache_salt, each.adapter)
            for each in requests
        }

    return await frontend.tokenization.call(hash_all)


def _check_logprobs_mode(request: GenerationRequest, info: ModelInfo) -> None:
    """Raise InvalidRequestError if the request wants other log-probabilities than this server computes."""
    if request.logprobs_mode not in (None, info.logprobs_mode):
        raise invalid(
            "logprobs_mode",
            f"must be {info.logprobs_mode}, which this server was started with (--logprobs-mode), "
            f"got {request.logprobs_mode}",
        )


def _routed_experts(request: GenerationRequest, info: ModelInfo, encoded: EncodedRequest) -> RoutedExpertsInfo | None:
    """Return the sizes of a token's experts; None if the request does not want them. Raises InvalidRequestError."""
    if not request.returns_routed_experts:
        return None
    routed = require_routed_experts(info)
    for prompt, max_tokens in zip(encoded.prompts, encoded.max_tokens, strict=True):
        check_size(routed, len(prompt), max_tokens)
    return routed


def _output_options(
    request: GenerationRequest, max_tokens: int, spec: ParserSpec, routed: RoutedExpertsInfo | None
) -> OutputOptions:
    """Return how the tokens of a prompt's choices become text. max_tokens: 0 if the client wants the prompt alone."""
    return OutputOptions(
        stop=request.stop,
        include_stop=request.include_stop,
        skip_special_tokens=request.skip_special_tokens,
        is_prompt_only=max_tokens == 0,
        returns_token_ids=request.returns_token_ids,
        routed_experts=routed,
        spec=spec,
    )


async def _load_embeds(frontend: Frontend, request: GenerationRequest, info: ModelInfo) -> dict[int, LoadedEmbeds]:
    """Return the embeddings of prompts by their index. Raises InvalidRequestError, and RateLimitError without memory."""
    loaded: dict[int, LoadedEmbeds] = {}
    for index, source in enumerate(request.prompt.prompts if isinstance(request.prompt, Texts) else ()):
        if isinstance(source, EmbedsSource):
            sizes = require_embeds(source, info)
            frontend.images.require_memory()
            load = partial(load_embeds, source, sizes, info.max_model_len)
            loaded[index] = await frontend.tokenization.call(load)
            frontend.images.hold(loaded[index], loaded[index].num_bytes)
    return loaded
