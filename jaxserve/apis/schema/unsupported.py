"""Known request fields that this server does not honour, and fields that may be ignored without harm.

They are fields of OpenAI, Anthropic, vLLM, SGLang, llama.cpp, Ollama and text-generation-inference.

A field in `UNSUPPORTED` with a value that means "do nothing" is accepted, since doing nothing honours it;
any other value is answered 400 with the field's name. A field in neither table and not in the schema is
ignored and named in the `x-jaxserve-ignored` header of the reply.
"""

from __future__ import annotations

from typing import Any

IGNORED_HEADER = "x-jaxserve-ignored"
TOOL_FORMAT_HEADER = "x-jaxserve-tool-format"

_OFF: tuple[Any, ...] = (None, False)
_EMPTY: tuple[Any, ...] = (None, [], {}, "")
_ONE: tuple[Any, ...] = (None, 1)
_NULL: tuple[Any, ...] = (None,)
_ZERO: tuple[Any, ...] = (None, 0)

NO_OPS: frozenset[str] = frozenset(
    {
        "user",
        "metadata",
        "cache_control",  # every prefix is cached
        "cache_prompt",
        "keep_alive",  # a model stays loaded
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "verbosity",
        "spaces_between_special_tokens",
        "parallel_tool_calls",
    }
)
"""Hints and bookkeeping: a reply without them is still a right reply."""

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": _OFF,
    "audio": _NULL,
    "best_of": _ONE,
    "chat_template": _NULL,
    "container": _NULL,
    "context": _EMPTY,
    "continue_final_message": _OFF,
    "conversation": _NULL,
    "custom_logit_processor": _NULL,
    "do_sample": (None, True),
    "documents": _EMPTY,
    "dry_multiplier": _ZERO,
    "dynatemp_range": _ZERO,
    "echo": _OFF,
    "embed_dtype": (None, "float32"),
    "endianness": (None, "native", "little"),
    "epsilon_cutoff": _ZERO,
    "eta_cutoff": _ZERO,
    "format": _EMPTY,
    "function_call": (None, "none"),
    "functions": _EMPTY,
    "grammar": _NULL,
    "guided_choice": _EMPTY,
    "guided_decoding_backend": _NULL,
    "guided_grammar": _EMPTY,
    "guided_json": _EMPTY,
    "guided_regex": _EMPTY,
    "guided_whitespace_pattern": _NULL,
    "image": _NULL,
    "image_data": _EMPTY,
    "image_generation": _NULL,
    "images": _EMPTY,
    "include_reasoning": (None, True),
    "kv_transfer_params": _NULL,
    "length_penalty": _ONE,
    "logits_processors": _EMPTY,
    "lora": _EMPTY,
    "lora_path": _NULL,
    "lora_request": _NULL,
    "max_chunks_per_doc": _NULL,
    "max_completion_tokens": _NULL,
    "max_length": _NULL,
    "max_new_tokens": _NULL,
    "max_output_tokens": _NULL,
    "max_tokens_per_doc": _NULL,
    "mcp_servers": _EMPTY,
    "messages": _EMPTY,
    "min_new_tokens": _ZERO,
    "mirostat": _ZERO,
    "mirostat_mode": _ZERO,
    "mm_processor_kwargs": _EMPTY,
    "modalities": (None, [], ["text"]),
    "moderation": _NULL,
    "n_cmpl": _ONE,
    "n_predict": _NULL,
    "n_probs": _ZERO,
    "negative_prompt": (None, ""),
    "no_repeat_ngram_size": _ZERO,
    "no_stop_trim": _OFF,
    "num_beams": _ONE,
    "num_predict": _NULL,
    "options": _EMPTY,
    "output_format": _NULL,
    "post_sampling_probs": _OFF,
    "prompt": _NULL,
    "prompt_embeds": _EMPTY,
    "random_seed": _NULL,
    "rank_fields": _EMPTY,
    "reasoning_effort": (None, "none"),
    "repeat_penalty": _ONE,
    "repetition_detection": _NULL,
    "return_routed_experts": _OFF,
    "return_token_ids": _OFF,
    "return_tokens": _OFF,
    "return_tokens_as_token_ids": _OFF,
    "samplers": _EMPTY,
    "sampling_params": _EMPTY,
    "separate_reasoning": (None, True),
    "session_params": _EMPTY,
    "smoothing_factor": _ZERO,
    "speed": (None, "standard"),
    "stop_regex": _EMPTY,
    "stop_sequences": _EMPTY,
    "structural_tag": _NULL,
    "suffix": (None, ""),
    "system": _EMPTY,
    "t_max_predict_ms": (None, 0, -1),
    "template": (None, ""),
    "tfs": _ONE,
    "tfs_z": _ONE,
    "think": _NULL,
    "thinking": (None, {"type": "disabled"}),
    "thinking_budget": _NULL,
    "tool_choice": (None, "none"),
    "tools": _EMPTY,
    "top_a": _ZERO,
    "top_n_sigma": (None, 0, -1),
    "truncate_prompt_tokens": _NULL,
    "typical": _ONE,
    "typical_p": _ONE,
    "use_beam_search": _OFF,
    "vllm_xargs": _EMPTY,
    "watermark": _OFF,
    "web_search_options": _NULL,
    "whitespace_pattern": _NULL,  # outlines' name of `guided_whitespace_pattern`
    "xtc_probability": _ZERO,
}
"""Field to the values that ask for nothing. A request struct that has the field goes first."""

INSTEAD: dict[str, str] = {
    "do_sample": "temperature",
    "dry_multiplier": "repetition_penalty",
    "dynatemp_range": "temperature",
    "epsilon_cutoff": "min_p",
    "eta_cutoff": "min_p",
    "format": "response_format",
    "function_call": "tool_choice",
    "functions": "tools",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "mirostat": "min_p",
    "mirostat_mode": "min_p",
    "n_cmpl": "n",
    "n_predict": "max_tokens",
    "n_probs": "logprobs",
    "no_repeat_ngram_size": "repetition_penalty",
    "no_stop_trim": "include_stop_str_in_output",
    "num_beams": "n",
    "num_predict": "max_tokens",
    "random_seed": "seed",
    "repeat_penalty": "repetition_penalty",
    "return_tokens": "return_token_ids",
    "return_tokens_as_token_ids": "return_token_ids",
    "smoothing_factor": "temperature",
    "stop_regex": "stop",
    "stop_sequences": "stop",
    "t_max_predict_ms": "max_tokens",
    "tfs": "min_p",
    "tfs_z": "min_p",
    "think": "reasoning_effort",
    "top_a": "min_p",
    "top_n_sigma": "min_p",
    "typical": "top_p",
    "typical_p": "top_p",
}
"""Fields that replace those of `UNSUPPORTED`, in requests that have them."""

ADVICE: dict[str, str] = {
    "context": "send the whole conversation again: its prefix is cached",
    "image_data": "put images into `messages` of /v1/chat/completions",
    "images": "put images into `messages` of /v1/chat/completions",
    "lora": "name the adapter in `model`",
    "lora_path": "name the adapter in `model`",
    "options": "its fields belong into the request itself, by OpenAI's names (`max_tokens` for `num_predict`)",
    "post_sampling_probs": "start the server with `--logprobs-mode processed_logprobs`",
    "samplers": "the order of the cuts is fixed: `top_k`, `top_p`, `min_p`",
    "sampling_params": "its fields belong into the request itself, by OpenAI's names (`max_tokens` for `max_new_tokens`)",
    "system": "begin `messages` with one whose role is `system`",
    "template": "start the server with `--chat-template`",
}
"""Advice on the fields of `UNSUPPORTED` that no other field replaces."""


def is_neutral(name: str, value: Any) -> bool:
    """Return True if `value` of the unsupported field `name` asks for nothing. Booleans are not numbers here."""
    return any(
        isinstance(value, bool) == isinstance(neutral, bool) and value == neutral for neutral in UNSUPPORTED[name]
    )
