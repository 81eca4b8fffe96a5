"""Known request fields that this server does not honour, and fields that may be ignored without harm.

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

NO_OPS: frozenset[str] = frozenset(
    {
        "user",
        "metadata",
        "cache_control",  # every prefix is cached
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
    "continue_final_message": _OFF,
    "conversation": _NULL,
    "documents": _EMPTY,
    "echo": _OFF,
    "embed_dtype": (None, "float32"),
    "endianness": (None, "native", "little"),
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
    "image_generation": _NULL,
    "include_reasoning": (None, True),
    "kv_transfer_params": _NULL,
    "length_penalty": _ONE,
    "logits_processors": _EMPTY,
    "lora_request": _NULL,
    "max_chunks_per_doc": _NULL,
    "max_tokens_per_doc": _NULL,
    "mm_processor_kwargs": _EMPTY,
    "mcp_servers": _EMPTY,
    "modalities": (None, [], ["text"]),
    "moderation": _NULL,
    "output_format": _NULL,
    "prompt": _NULL,
    "prompt_embeds": _EMPTY,
    "rank_fields": _EMPTY,
    "reasoning_effort": (None, "none"),
    "repetition_detection": _NULL,
    "return_routed_experts": _OFF,
    "return_token_ids": _OFF,
    "return_tokens_as_token_ids": _OFF,
    "speed": (None, "standard"),
    "stop_regex": _EMPTY,
    "structural_tag": _NULL,
    "suffix": (None, ""),
    "thinking": (None, {"type": "disabled"}),
    "thinking_budget": _NULL,
    "tool_choice": (None, "none"),
    "tools": _EMPTY,
    "truncate_prompt_tokens": _NULL,
    "use_beam_search": _OFF,
    "vllm_xargs": _EMPTY,
    "web_search_options": _NULL,
    "whitespace_pattern": _NULL,  # outlines' name of `guided_whitespace_pattern`
}
"""Field to the values that ask for nothing. A request struct that has the field goes first."""

INSTEAD: dict[str, str] = {
    "function_call": "tool_choice",
    "functions": "tools",
    "return_tokens_as_token_ids": "return_token_ids",
    "stop_regex": "stop",
}
"""Fields that replace those of `UNSUPPORTED`, in requests that have them."""


def is_neutral(name: str, value: Any) -> bool:
    """Return True if `value` of the unsupported field `name` asks for nothing. Booleans are not numbers here."""
    return any(
        isinstance(value, bool) == isinstance(neutral, bool) and value == neutral for neutral in UNSUPPORTED[name]
    )
