"""LlamaIndex's OpenAILike: chats, completions, objects, calls and embeddings."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.lane import AFTER_RESULTS, API_KEY, library
from tests.clients.questions import ANSWER, MODEL, PARIS, QUESTION, Capital
from tests.e2e.http_server import Server

llms = library("llama_index.core.llms")
core_tools = library("llama_index.core.tools")
openai_like = library("llama_index.llms.openai_like")
embeddings = library("llama_index.embeddings.openai_like")
prompts = library("llama_index.core.prompts")

ASKED = QUESTION[0]["content"]


def make(server: Server, model: str = MODEL, **options: Any) -> Any:
    limits = {"context_window": 1024, "max_tokens": 64} if model == MODEL else {"context_window": 2048}
    options = {"is_chat_model": True, "temperature": 0, "max_retries": 0} | limits | options
    return openai_like.OpenAILike(model=model, api_base=f"{server.url}/v1", api_key=API_KEY, **options)


async def test_plain_and_streamed_chat(smollm2: Server) -> None:
    llm = make(smollm2)
    messages = [llms.ChatMessage(role="user", content=ASKED)]
    assert llm.chat(messages).message.content == ANSWER
    deltas = [chunk.delta for chunk in llm.stream_chat(messages)]
    assert "".join(deltas) == ANSWER
    assert len(deltas) > 2
    assert (await llm.achat(messages)).message.content == ANSWER


def test_plain_and_streamed_completion(smollm2: Server) -> None:
    llm = make(smollm2, is_chat_model=False, max_tokens=4)
    whole = llm.complete("The capital of France is")
    assert whole.text.startswith(" Paris")
    assert "".join(chunk.delta for chunk in llm.stream_complete("The capital of France is")) == whole.text


@pytest.mark.parametrize("way", ["should_use_structured_outputs", "is_function_calling_model"])
def test_objects_by_a_schema_and_by_a_forced_call(smollm2: Server, way: str) -> None:
    llm = make(smollm2, **{way: True})
    prompt = prompts.PromptTemplate("What is the capital of {country}?")
    assert llm.structured_predict(Capital, prompt, country="France") == PARIS


def test_tools_are_called_and_their_results_answered(tools: Server) -> None:
    def get_weather(city: str, note: str) -> str:
        """Get the weather in a city."""
        return f"sunny in {city}, {note}"

    def now() -> str:
        """Get the time."""
        return "noon"

    llm = make(tools, "tiny", is_function_calling_model=True)
    functions = [core_tools.FunctionTool.from_defaults(fn=function) for function in (get_weather, now)]
    reply = llm.predict_and_call(functions, "The weather?", allow_parallel_tool_calls=True)
    assert [source.content for source in reply.sources] == ['sunny in Paris, café "x"', "noon"]
    asked = llm.chat_with_tools(functions, "The weather?", allow_parallel_tool_calls=True)
    calls = llm.get_tool_calls_from_response(asked)
    results = [
        llms.ChatMessage(role="tool", content="sunny", additional_kwargs={"tool_call_id": call.tool_id})
        for call in calls
    ]
    history = [llms.ChatMessage(role="user", content="The weather?"), asked.message, *results]
    assert llm.chat_with_tools(functions, chat_history=history).message.content == AFTER_RESULTS


def test_embeddings(minilm: Server) -> None:
    embedding = embeddings.OpenAILikeEmbedding(
        model_name="minilm", api_base=f"{minilm.url}/v1", api_key=API_KEY, max_retries=0
    )
    [first, second] = embedding.get_text_embedding_batch(["A cat sleeps.", "Shares fell."])
    assert len(first) == len(second) == 384
    assert embedding.get_query_embedding("A cat sleeps.") == pytest.approx(first, abs=1e-5)
