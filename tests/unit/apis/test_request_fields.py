"""Every request field is honoured, refused by name, or ignored by name; never anything else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from jaxserve.apis.anthropic.schema import MessagesRequest
from jaxserve.apis.openai import chat, completions
from jaxserve.apis.openai.chat_schema import ChatRequest
from jaxserve.apis.openai.completions_schema import CompletionRequest
from jaxserve.apis.openai.embeddings import EmbeddingRequest
from jaxserve.apis.schema.decode import decode_request
from jaxserve.apis.schema.unsupported import ADVICE, INSTEAD, NO_OPS, UNSUPPORTED, is_neutral
from jaxserve.config import LimitsConfig
from jaxserve.errors import InvalidRequestError, UnsupportedParameterError
from jaxserve.frontend.checks import check_bounds
from jaxserve.frontend.request import Texts
from jaxserve.frontend.sampling import sampling_params
from jaxserve.sampling.params import COLUMNS

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}

TOOLS: list[Any] = [{"type": "function", "function": {"name": "f"}}]
CALLS: list[Any] = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
ASSISTANT: list[Any] = [{"role": "assistant", "content": "Hi"}]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    """Return OpenAI's choice among some functions."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


ASKING = {
    "add_special_tokens": True,
    "audio": {"voice": "a"},
    "best_of": 2,
    "chat_template": "{{ x }}",
    "continue_final_message": True,
    "container": "x",
    "documents": [{"text": "x"}],
    "echo": True,
    "embed_dtype": "float16",
    "endianness": "big",
    "max_chunks_per_doc": 3,
    "max_tokens_per_doc": 9,
    "rank_fields": ["text"],
    "function_call": "auto",
    "functions": [{"name": "f"}],
    "grammar": "root ::= x",
    "guided_choice": ["a"],
    "guided_decoding_backend": "x",
    "guided_grammar": "x",
    "guided_json": {"type": "object"},
    "guided_regex": "x+",
    "guided_whitespace_pattern": "x",
    "image_generation": {},
    "include_reasoning": False,
    "kv_transfer_params": {},
    "length_penalty": 1.5,
    "logits_processors": ["x"],
    "lora_request": {"a": 1},
    "mm_processor_kwargs": {"a": 1},
    "mcp_servers": [{"name": "x"}],
    "messages": [{"role": "user", "content": "x"}],
    "modalities": ["text", "audio"],
    "output_format": {"type": "json_schema"},
    "prompt_embeds": "AAAA",
    "reasoning_effort": "low",
    "repetition_detection": {"a": 1},
    "return_routed_experts": True,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "speed": "fast",
    "conversation": "conv_1",
    "image": {"context_compression": "auto"},
    "moderation": {"model": "x"},
    "prompt": {"id": "pmpt_1"},
    "stop_regex": "x",
    "structural_tag": {"a": 1},
    "suffix": "x",
    "thinking": {"type": "enabled"},
    "thinking_budget": 100,
    "tool_choice": "auto",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "truncate_prompt_tokens": 5,
    "use_beam_search": True,
    "vllm_xargs": {"a": 1},
    "web_search_options": {},
    "whitespace_pattern": "x",
    "context": [1, 2],
    "custom_logit_processor": "x",
    "do_sample": False,
    "dry_multiplier": 0.8,
    "dynatemp_range": 0.5,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "format": "json",
    "image_data": [{"id": 1, "data": "x"}],
    "images": ["x"],
    "lora": [{"id": 0, "scale": 1.0}],
    "lora_path": "x",
    "max_completion_tokens": 4,
    "max_length": 4,
    "max_new_tokens": 4,
    "max_output_tokens": 4,
    "min_new_tokens": 4,
    "mirostat": 2,
    "mirostat_mode": 2,
    "n_cmpl": 2,
    "n_predict": 4,
    "n_probs": 3,
    "negative_prompt": "x",
    "no_repeat_ngram_size": 3,
    "no_stop_trim": True,
    "num_beams": 4,
    "num_predict": 4,
    "options": {"temperature": 0},
    "post_sampling_probs": True,
    "random_seed": 1,
    "repeat_penalty": 1.1,
    "return_tokens": True,
    "samplers": ["top_k"],
    "sampling_params": {"temperature": 0},
    "separate_reasoning": False,
    "session_params": {"id": 1},
    "smoothing_factor": 0.1,
    "stop_sequences": ["x"],
    "system": "Be brief.",
    "t_max_predict_ms": 9,
    "template": "{{ x }}",
    "tfs": 0.5,
    "tfs_z": 0.5,
    "think": True,
    "top_a": 0.5,
    "top_n_sigma": 1.0,
    "typical": 0.5,
    "typical_p": 0.5,
    "watermark": True,
    "xtc_probability": 0.5,
}


def decode_without(name: str, value: Any) -> list[str]:
    """Decode a request of an endpoint that does not have the field; returns the fields that were ignored."""
    bodies: dict[type[msgspec.Struct], dict[str, Any]] = {
        ChatRequest: CHAT,
        CompletionRequest: {"prompt": "Hi"},
        EmbeddingRequest: {"input": "Hi"},
    }
    struct, body = next((one, body) for one, body in bodies.items() if name not in one.__struct_fields__)
    return decode_request(struct, msgspec.json.encode(body | {name: value}))[1]


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b", "oops": 1}]},
            ["messages[1].oops"],
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
            ["messages[0].content[0].x"],
        ),
        (
            {"tools": [{"type": "function", "y": 0, "function": {"name": "f", "z": True}}]},
            ["tools[0].y", "tools[0].function.z"],
        ),
        ({"stream": True, "stream_options": {"include_usage": True, "often": True}}, ["stream_options.often"]),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"any": "thing"}, "v": 2}}},
            ["response_format.json_schema.v"],
        ),
        ({"messages": [{"role": "assistant", "content": "a", "refusal": None, "annotations": []}]}, []),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "e"}}]}
                ]
            },
            [],
        ),
        ({"chat_template_kwargs": {"any": "thing"}, "logit_bias": {"1": 1}, "metadata": {"a": "b"}}, []),
    ],
)
def test_unknown_fields_of_inner_objects_are_named(fields: dict[str, Any], ignored: list[str]) -> None:
    assert decode_chat(**fields)[1] == ignored


def test_the_variant_that_was_decoded_says_what_is_unknown() -> None:
    blocks = [
        {"type": "tool_use", "id": "a", "name": "f", "input": {"any": 1}, "text": "x"},
        {"type": "text", "text": "y"},
    ]
    body = {
        "max_tokens": 1,
        "messages": [{"role": "assistant", "content": blocks}],
        "tool_choice": {"type": "auto", "w": 1},
    }
    _, ignored = decode_request(MessagesRequest, msgspec.json.encode(body))
    assert ignored == ["messages[0].content[0].text", "tool_choice.w"]


@pytest.mark.parametrize(
    ("setting", "fields"),
    [
        ("max_choices", {"n": 2}),
        ("max_messages", {"messages": [{"role": "user", "content": "a"}] * 2}),
        ("max_stop_strings", {"stop": ["a", "b"]}),
        ("max_stop_chars", {"stop": ["aa"]}),
        ("max_stop_chars", {"stop": "aa"}),
        ("max_stop_token_ids", {"stop_token_ids": [1, 2]}),
        ("max_top_logprobs", {"logprobs": True, "top_logprobs": 2}),
        ("max_top_logprobs", {"prompt_logprobs": 2}),
        ("max_top_logprobs", {"logprobs": True, "logprob_token_ids": [1, 2]}),
        ("max_logit_bias", {"logit_bias": {"1": 1, "2": 1}}),
        ("max_bad_words", {"bad_words": ["a", "b"]}),
        ("max_bad_word_chars", {"bad_words": ["aa"]}),
        ("max_tools", {"tools": [{"type": "function", "function": {"name": name}} for name in "fg"]}),
    ],
)
def test_a_limit_is_a_setting_that_its_error_names(setting: str, fields: dict[str, Any]) -> None:
    request, _ = decode_chat(**fields)
    flag = f"--{setting.replace('_', '-')}"
    with pytest.raises(InvalidRequestError, match=rf"to 1 ?\w* \({flag}\), got 2\.$") as refused:
        check_chat(request, replace(LimitsConfig(), **{setting: 1}))
    assert refused.value.param in fields
    check_chat(request, replace(LimitsConfig(), **{setting: 2}))


def test_limits_on_prompts_are_settings() -> None:
    request, _ = decode_request(CompletionRequest, b'{"prompt": ["a", "b"], "n": 2}')
    with pytest.raises(InvalidRequestError, match=r"1 to 1 items \(--max-prompts\), got 2"):
        check_completion(request, LimitsConfig(max_prompts=1))
    with pytest.raises(InvalidRequestError, match=r"at most 3 \(--max-total-choices\), got 2 x 2"):
        check_completion(request, LimitsConfig(max_total_choices=3))
    check_completion(request, LimitsConfig(max_prompts=2, max_total_choices=4))


@pytest.mark.parametrize(
    ("setting", "fields", "size"),
    [
        ("max_function_chars", {"tools": [{"type": "function", "function": {"name": "f"}}]}, 12),
        ("max_template_kwargs_chars", {"chat_template_kwargs": {"a": 1}}, 7),
    ],
)
def test_limits_on_json_are_settings(setting: str, fields: dict[str, Any], size: int) -> None:
    request, _ = decode_chat(**fields)
    with pytest.raises(InvalidRequestError, match=rf"--{setting.replace('_', '-')}\), got"):
        check_chat(request, replace(LimitsConfig(), **{setting: size - 1}))
    check_chat(request, replace(LimitsConfig(), **{setting: 1000}))


def check_chat(request: ChatRequest, limits: LimitsConfig) -> None:
    check_bounds(request, limits)
    chat.to_request(request, limits)


def check_completion(request: CompletionRequest, limits: LimitsConfig) -> list[str | list[int]]:
    """Check the request; return its prompts."""
    check_bounds(request, limits)
    translated = completions.to_request(request, limits)
    assert isinstance(translated.prompt, Texts)
    return list(translated.prompt.prompts)


def decode_chat(**fields: Any) -> tuple[ChatRequest, list[str]]:
    return decode_request(ChatRequest, msgspec.json.encode(CHAT | fields))


def checked_chat(**fields: Any) -> ChatRequest:
    request, _ = decode_chat(**fields)
    check_chat(request, LimitsConfig())
    sampling_params(request, {}, max_tokens=1, seed=request.seed or 0, num_top_logprobs=None, vocab_size=10)
    return request


def test_the_table_of_examples_is_complete() -> None:
    assert ASKING.keys() == UNSUPPORTED.keys()


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_unsupported_field_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedParameterError) as caught:
        decode_without(name, ASKING[name])
    assert caught.value.param == name
    assert name in caught.value.message
    assert (caught.value.status, caught.value.code) == (400, "unsupported_parameter")


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in sorted(UNSUPPORTED.items()) for value in values]
)
def test_neutral_value_of_unsupported_field_is_accepted(name: str, value: Any) -> None:
    assert decode_without(name, value) == []


def test_neutral_numbers_may_be_floats_but_not_booleans() -> None:
    assert is_neutral("length_penalty", 1.0)
    assert not is_neutral("length_penalty", True)
    assert not is_neutral("use_beam_search", 0)


@pytest.mark.parametrize("name", sorted(NO_OPS))
def test_harmless_field_is_accepted(name: str) -> None:
    assert decode_without(name, "anything") == []


def test_unknown_fields_are_ignored_by_name() -> None:
    _, unknown = decode_chat(foo_bar=1, baz=None)
    assert unknown == ["foo_bar", "baz"]


def test_every_sampler_option_is_a_request_field() -> None:
    for struct in (ChatRequest, CompletionRequest):
        assert set(COLUMNS) <= set(struct.__struct_fields__)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"seed": 2**63}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 1.5}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop_token_ids": list(range(129))}, "stop_token_ids"),
        ({"stop_token_ids": [10]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 101}, "repetition_penalty"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"logit_bias": {"10": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 100.5}}, "logit_bias"),
        ({"logit_bias": {"1": "a"}}, "logit_bias[...]"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [10]}, "allowed_token_ids"),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids[0]"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
        ({"bad_words": ["x" * 257]}, "bad_words"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": "x"}, "bad_words"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"logprob_token_ids": [10], "logprobs": True}, "logprob_token_ids"),
        ({"logprob_token_ids": [], "logprobs": True}, "logprob_token_ids"),
        ({"logprob_token_ids": [1] * 21, "logprobs": True}, "logprob_token_ids"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": "yes"}, "stream"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"priority": 2**40}, "priority"),
        ({"chat_template_kwargs": {"x": "y" * 20_000}}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": CALLS}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages[0].function_call"),
        ({"tools": TOOLS * 129}, "tools"),
        ({"tools": TOOLS * 2}, "tools[1].function.name"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 70_000}}]},
            "tools[0].function",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": {}}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": allowed("required", "g")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": allowed("none", "f")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": allowed("auto")}, "tool_choice"),
        ({"tool_choice": allowed("auto", "f")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": TOOLS}}, "tool_choice"),
        ({"tool_choice": allowed("auto", "f"), "tools": [*TOOLS, {"type": "custom"}]}, "tools[1].type"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
        ({"continue_final_message": True}, "continue_final_message"),
        (
            {"continue_final_message": True, "messages": [{"role": "assistant", "tool_calls": CALLS}]},
            "continue_final_message",
        ),
        (
            {"continue_final_message": True, "add_generation_prompt": True, "messages": ASSISTANT},
            "continue_final_message",
        ),
    ],
)
def test_value_out_of_range_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        checked_chat(**fields)
    assert caught.value.param == param


def test_tools_that_can_be_called_are_accepted() -> None:
    for choice in (None, "auto", "none"):
        checked_chat(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    checked_chat(tools=[], tool_choice="none")
    strict: Any = [{"type": "function", "function": {"name": "f", "strict": True}}]
    for forced in ("required", {"type": "function", "function": {"name": "f"}}):
        checked_chat(tools=strict, tool_choice=forced)
    checked_chat(messages=ASSISTANT, continue_final_message=True, add_generation_prompt=False)


@pytest.mark.parametrize("kind", ["input_audio", "video", "file"])
def test_media_part_is_refused(kind: str) -> None:
    part = {"type": kind, kind: {"url": "file:///etc/passwd"}}
    with pytest.raises(UnsupportedParameterError, match=kind):
        checked_chat(messages=[{"role": "user", "content": [{"type": "text", "text": "look"}, part]}])


def test_number_that_overflows_a_float_is_refused() -> None:
    for number in (b"1e999", b"NaN", b"Infinity", b"-Infinity", b"9" * 5000):
        body = msgspec.json.encode(CHAT)[:-1] + b',"temperature":' + number + b"}"
        with pytest.raises(InvalidRequestError):
            decode_request(ChatRequest, body)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"messages": 1} x', b'{"a": "\xff"}', b'{"a":' + b"[" * 100_000]
)
def test_malformed_body_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        decode_request(ChatRequest, body)


def test_error_repeats_value_and_limit_but_not_without_bound() -> None:
    with pytest.raises(InvalidRequestError, match=r"temperature.*2\.0.*2\.5"):
        checked_chat(temperature=2.5)
    with pytest.raises(InvalidRequestError) as caught:
        checked_chat(n=10**3000)
    assert len(caught.value.message) < 400


def test_defaults_and_special_values_become_sampling_params() -> None:
    request = checked_chat(top_k=-1, temperature=None, seed=2**40 + 5, stop_token_ids=[3], ignore_eos=True)
    params = sampling_params(request, {}, max_tokens=7, seed=request.seed or 0, num_top_logprobs=2, vocab_size=10)
    assert (params.top_k, params.temperature, params.top_p, params.min_p) == (0, 1.0, 1.0, 0.0)
    assert (params.seed, params.max_tokens, params.num_top_logprobs) == (5, 7, 2)
    assert (params.stop_token_ids, params.ignore_eos) == ([3], True)


def test_what_a_request_says_goes_before_what_the_model_recommends() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1}
    request = checked_chat(top_p=1, top_k=-1, temperature=None)
    params = sampling_params(request, defaults, max_tokens=7, seed=0, num_top_logprobs=None, vocab_size=10)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.6, 0, 1.0, 0.0)
    assert params.repetition_penalty == 1.1


def test_every_sampler_option_reaches_the_engine() -> None:
    options: dict[str, Any] = {
        "presence_penalty": 0.5,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "min_tokens": 4,
        "logit_bias": {"3": 5, "9": -100},
        "allowed_token_ids": [1, 3],
        "bad_words": ["no"],
    }
    params = sampling_params(
        checked_chat(**options | {"min_tokens": 0}), {}, max_tokens=7, seed=0, num_top_logprobs=None, vocab_size=10
    )
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, -1.0, 1.5)
    assert (params.logit_bias, params.allowed_token_ids) == ({3: 5.0, 9: -100.0}, [1, 3])
    request, _ = decode_chat(**options)
    params = sampling_params(
        request, {}, max_tokens=4, seed=0, num_top_logprobs=None, vocab_size=10, words={"bad_words": [[4], [5, 6]]}
    )
    assert (params.min_tokens, params.bad_words) == (4, [[4], [5, 6]])
    for bad_words in ([[1]] * 257, [[1] * 17]):
        with pytest.raises(InvalidRequestError) as caught:
            sampling_params(
                request, {}, max_tokens=4, seed=0, num_top_logprobs=None, vocab_size=10, words={"bad_words": bad_words}
            )
        assert caught.value.param == "bad_words"


def completion(**fields: Any) -> list[str | list[int]]:
    request, _ = decode_request(CompletionRequest, msgspec.json.encode(fields))
    return check_completion(request, LimitsConfig())


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_four_kinds_of_prompt(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt) == prompts


@pytest.mark.parametrize("prompt", ["", [], [[]], ["a", ""], ["a", [1]], [1.5], [{}], [True], None])
def test_bad_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(prompt=prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 11}, "n"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
    ],
)
def test_completion_field_out_of_range_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(**fields)
    assert caught.value.param == param


def test_completion_accepts_best_of_n_and_echo_without_tokens() -> None:
    assert completion(prompt="a", best_of=2, n=2) == ["a"]
    with pytest.raises(UnsupportedParameterError, match=r"'best_of' must equal `n` \(2\), got 3"):
        completion(prompt="a", best_of=3, n=2)
    assert completion(prompt="a", echo=True, max_tokens=0) == ["a"]


@pytest.mark.parametrize(("name", "instead"), INSTEAD.items())
def test_the_error_for_a_field_names_the_one_to_use_where_the_request_has_it(name: str, instead: str) -> None:
    chat = (ChatRequest, CHAT) if name not in ChatRequest.__struct_fields__ else (CompletionRequest, {"prompt": "Hi"})
    for struct, body in (chat, (EmbeddingRequest, {"input": "Hi"})):
        with pytest.raises(UnsupportedParameterError) as error:
            decode_request(struct, msgspec.json.encode(body | {name: ASKING[name]}))
        names_it = f"not supported by this server; use `{instead}`" in str(error.value)
        assert names_it == (struct is not EmbeddingRequest)


@pytest.mark.parametrize(("name", "advice"), ADVICE.items())
def test_the_error_for_a_field_without_a_replacement_says_what_to_do(name: str, advice: str) -> None:
    with pytest.raises(UnsupportedParameterError) as error:
        decode_chat(**{name: ASKING[name]})
    assert str(error.value) == f"Unsupported parameter: '{name}' is not supported by this server; {advice}."
