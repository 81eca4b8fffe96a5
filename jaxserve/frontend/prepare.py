"""From a checked chat request to its job: prompt, reading of the reply, grammar. Every endpoint that chats comes here."""

from __future__ import annotations

from jaxserve.apis.openai.chat_schema import ChatRequest
from jaxserve.frontend.grammars.calls import call_grammar
from jaxserve.frontend.handle import Job, grammar_of, make_job
from jaxserve.frontend.request import encode_conversation, parser_spec
from jaxserve.http.state import ServerState
from jaxserve.ipc.messages import ModelInfo


async def make_chat_job(
    state: ServerState, model_info: ModelInfo, request: ChatRequest, *, default_max_tokens: int | None = None
) -> Job:
    """Engine requests for every choice of a request that `check_chat` has passed. Raises RequestError.

    default_max_tokens: of a request without a limit; less where the context ends before. None: as many as fit.
    """
    tokens = state.tokenization
    prompt = await encode_conversation(tokens, request.messages, request, model_info.max_model_len)
    is_parallel = request.parallel_tool_calls is not False
    spec = parser_spec(tokens, prompt, request.messages, request, max_calls=None if is_parallel else 1)
    calls = call_grammar(
        tokens,
        request.tools,
        request.tool_choice,
        is_parallel=is_parallel,
        max_depth=state.grammars.config.max_grammar_depth,
    )
    return make_job(
        state,
        model_info,
        request,
        [prompt],
        asked_max_tokens=request.output_limit,
        default_max_tokens=default_max_tokens,
        num_top_logprobs=request.num_top_logprobs,
        words=await tokens.encode_words(request),
        param="messages",
        spec=spec,
        grammar=await grammar_of(state, request, spec, calls, request.thinking_token_budget),
        prediction=await tokens.encode_start(request.prediction.text, model_info.max_model_len)
        if request.prediction
        else (),
    )
