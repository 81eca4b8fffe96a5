"""Settings that limit requests: their options, their grammars and what is stored for later ones."""

from __future__ import annotations

import re
from dataclasses import dataclass

from jaxserve.config.option import option
from jaxserve.errors import ConfigError
from jaxserve.types import MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_TOP_LOGPROBS


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredConfig:
    """Limits on the grammars of structured output."""

    max_grammar_size: int = option(
        64 << 10, ge=1, unit="bytes", help="largest JSON schema, regex or grammar of a request"
    )
    max_grammar_depth: int = option(64, ge=1, le=512, help="deepest nesting of a schema's JSON")
    grammar_timeout: float = option(
        2.0, ge=0.1, le=60, help="processor seconds that the check of one grammar may take, in a separate process"
    )
    grammar_memory: int = option(
        2 << 30, ge=256 << 20, unit="bytes", help="address space that the check of one grammar may use"
    )
    max_grammar_states: int = option(50_000, ge=100, help="states of one grammar's lexer")


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitsConfig:
    """Limits on one request; requests beyond get 400."""

    max_body_values: int = option(
        1 << 16, ge=1, help="JSON values of a body, not counting numbers in lists of token ids"
    )
    max_choices: int = option(128, ge=1, help="choices per prompt (`n`)")
    max_prompts: int = option(256, ge=1, help="prompts of one request")
    max_total_choices: int = option(1024, ge=1, help="choices of one request: prompts times `n`")
    max_inputs: int = option(2048, ge=1, help="texts of a request for embeddings, documents of a request for scores")
    max_input_tokens: int = option(300_000, ge=1, help="tokens of all these texts together")
    max_messages: int = option(10_000, ge=1, help="messages of a conversation")
    max_stop_strings: int = option(16, ge=1, help="stop strings")
    max_stop_chars: int = option(1024, ge=1, help="characters of one stop string")
    max_stop_token_ids: int = option(128, ge=0, help="stop tokens")
    max_top_logprobs: int = option(
        MAX_TOP_LOGPROBS, ge=0, le=MAX_TOP_LOGPROBS, help="log-probabilities per position (`top_logprobs`)"
    )
    max_logit_bias: int = option(MAX_LOGIT_BIAS, ge=0, le=MAX_LOGIT_BIAS, help="tokens with a bias")
    max_bad_words: int = option(128, ge=0, le=MAX_BAD_WORDS, help="words of `bad_words`")
    max_bad_word_chars: int = option(256, ge=1, help="characters of one of these words")
    max_tools: int = option(128, ge=0, help="tools of a request")
    max_function_chars: int = option(65_536, ge=1, help="characters of the definition of one tool, as JSON")
    max_template_kwargs_chars: int = option(16_384, ge=2, help="characters of `chat_template_kwargs`, as JSON")


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponsesConfig:
    """Responses of /v1/responses that are stored for later requests, in memory."""

    max_stored_responses: int = option(
        1024, ge=0, help="stored responses; beyond, the least recently used is dropped; 0: none"
    )
    max_stored_bytes: int = option(64 << 20, ge=0, unit="bytes", help="bytes of all stored responses")
    response_ttl: float = option(3600.0, ge=0, help="seconds that a response is stored after its last use")
    response_id_suffix: str = option(
        "",
        help="up to 32 lower-case letters and digits at the end of the ids of this server's responses, by which a balancer before "
        "several servers sends a request that names a response to the one that stores it",
    )

    def __post_init__(self) -> None:
        if not re.fullmatch("[0-9a-z]{0,32}", self.response_id_suffix):
            raise ConfigError(
                f"--response-id-suffix {self.response_id_suffix!r}: expected up to 32 lower-case letters and digits"
            )
