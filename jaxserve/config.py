"""Every setting of the server, declared once.

A field carries its help text; the CLI flag (`--max-num-seqs`), the key in a YAML file
(`max_num_seqs`), the environment variable (`JAXSERVE_MAX_NUM_SEQS`) and the reference page all derive
from it. Configs are frozen: made once, resolved once, printed at start.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxserve.errors import ConfigError
from jaxserve.types import MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_TOP_LOGPROBS

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
CpuKernels = Literal["auto", "native", "matrix", "vector", "xla"]
KVCacheDtype = Literal["auto", "fp8"]
AttentionBackend = Literal["auto", "reference", "pallas"]
Task = Literal["auto", "generate", "embed"]
PoolingChoice = Literal["auto", "last", "mean", "cls"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


def option(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    ge: float | None = None,
    le: float | None = None,
    unit: Literal["bytes"] | None = None,
    secret: bool = False,
    choices_from: str | None = None,
) -> Any:
    """Declare a setting: its default, its help text and its limits (`unit="bytes"` accepts `512MiB`).

    choices_from: for a setting of type `str`, the function that returns the allowed values, as "module:function". It is
    called when settings are read, and the default is allowed as well. The module must be cheap to import: no jax.
    """
    metadata = {"help": help, "ge": ge, "le": le, "unit": unit, "secret": secret, "choices_from": choices_from}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Which model, in which precision."""

    model: str = option(help="GGUF file, Hugging Face directory, or hub id (`owner/name`)")
    revision: str | None = option(None, help="hub branch, tag or commit")
    served_model_name: str | None = option(
        None, help="name(s) that requests use, comma separated; the first is echoed (default: MODEL)"
    )
    lora_modules: str | None = option(
        None,
        help="LoRA adapters to serve beside the model, NAME=PATH (a folder as PEFT saves it, or a hub id), comma "
        "separated; requests choose one by its name as their model",
    )
    dtype: Dtype = option(
        "auto",
        help="weights, and but for CPUs (float32) activations and KV cache; auto: float32 on CPU, else bfloat16",
    )
    quantization: str = option(
        "auto",
        choices_from="jaxserve.quant.names:format_names",
        help="int8, fp8 (e4m3): weights and, token by token, activations; -weight-only: weights; one scale per output, "
        "of int4 for each group of inputs; auto: as the checkpoint is stored",
    )
    max_model_len: int | None = option(None, ge=1, help="longest prompt + output in tokens (default: the model's)")
    seed: int = option(0, ge=0, help="seed from which requests without a seed draw theirs")
    chat_template: str | None = option(None, help="path of a jinja chat template that replaces the model's own")
    generation_config: str = option(
        "auto",
        help="temperature, top_k, top_p, min_p, repetition_penalty of requests that leave them out; "
        "auto: as the checkpoint recommends; none: 1 and no cuts; else a generation_config.json, or its folder",
    )
    task: Task = option("auto", help="generate: text; embed: vectors of texts; auto: embed for encoders, else generate")
    pooling: PoolingChoice = option(
        "auto",
        help="how a text's vector comes from those of its tokens; auto: as the checkpoint's modules.json says, "
        "else last for decoders and mean for encoders",
    )

    @property
    def adapters(self) -> dict[str, str]:
        """Where each adapter of `lora_modules` is, by name. Raises ConfigError."""
        adapters: dict[str, str] = {}
        for entry in filter(None, (part.strip() for part in (self.lora_modules or "").split(","))):
            name, separator, path = (part.strip() for part in entry.partition("="))
            if not (name and separator and path):
                raise ConfigError(f"--lora-modules {entry!r}: expected NAME=PATH")
            if name in adapters:
                raise ConfigError(f"--lora-modules: two adapters are called {name!r}")
            adapters[name] = path
        return adapters

    def check_generates(self) -> None:
        """Raise ConfigError for what only an engine that embeds can do."""
        if self.task == "embed":
            raise ConfigError("--task embed: plans and programs made ahead are for servers that generate")
        if self.pooling != "auto":
            raise ConfigError(f"--pooling {self.pooling}: only for servers that embed (--task embed)")


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = option(16, ge=1, le=1024, help="tokens per KV page")
    kv_cache_memory: int | None = option(
        None, ge=1, unit="bytes", help="bytes for the KV cache, e.g. 2GiB (default: from --memory-fraction)"
    )
    memory_fraction: float = option(
        0.9, ge=0.01, le=0.99, help="share of accelerator memory to use when --kv-cache-memory is not given"
    )
    kv_cache_dtype: KVCacheDtype = option(
        "auto", help="auto: the model's, float32 on CPUs; fp8: 8-bit floats (e4m3), half the memory, on accelerators"
    )
    enable_prefix_caching: bool = option(True, help="reuse KV pages of prompts that start alike")


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """What may run together."""

    max_num_seqs: int | None = option(
        None, ge=1, le=4096, help="requests that run at the same time (default: 32 on CPU, 256 on accelerators)"
    )
    max_num_batched_tokens: int | None = option(
        None, ge=1, help="tokens computed in one step (default: 128 on CPU, 2048 on accelerators)"
    )
    max_queued_requests: int = option(1024, ge=0, help="requests that may wait; more are answered 429")
    max_queued_tokens: int = option(
        4_194_304, ge=1, help="prompt tokens that may wait; requests with more are answered 429"
    )
    overlap: bool = option(True, help="dispatch the next step before the last one is read")
    max_burst_ms: float = option(
        100.0, ge=0, help="most milliseconds of decoding in one call while nobody waits, 0: one step a call"
    )
    num_speculative_tokens: int = option(
        0, ge=0, le=64, help="most tokens guessed ahead for a request, from what its own text repeats; 0: none"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How many devices one engine spans."""

    tensor_parallel_size: int = option(1, ge=1, help="devices that share every layer")


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileConfig:
    """Programs, kernels and the compile cache."""

    attention_backend: AttentionBackend = option(
        "auto",
        help="paged-attention kernel; auto: pallas on Hopper GPUs, native CPU kernels where they were built, "
        "else reference (XLA alone)",
    )
    cpu_kernels: CpuKernels = option(
        "auto",
        help="native: C++ kernels built by `python -m jaxserve_kernels.native.build`, matrix: with float matmuls on "
        "AMX (Intel), vector: without, as with --max-num-seqs up to 4; xla: none; auto: native on a CPU where they were "
        "built",
    )
    try_kernels: bool = option(
        True,
        help="before its Pallas kernels are used the first time, compare them with XLA in a process of their own; "
        "where they fail, attention is left to XLA",
    )
    compile_cache: str | None = option(
        None,
        help="directory of compiled programs, kept to 2GiB (default: jaxserve/programs in $XDG_CACHE_HOME or ~/.cache; "
        "`off` disables)",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """The HTTP side."""

    host: str = option("127.0.0.1", help="address to listen on; 0.0.0.0 for every interface")
    port: int = option(8000, ge=0, le=65535, help="port to listen on; 0 picks a free one")
    api_key: str | None = option(None, secret=True, help="key(s), comma separated; without one the API is open")
    api_key_file: str | None = option(None, help="file of further keys, one a line; lines that begin with # are none")
    cors_allowed_origins: str | None = option(
        None, help="origins whose web pages may call, comma separated, or `*` (default: none)"
    )
    strict_parameters: bool = option(False, help="answer request fields that nobody knows 400 instead of ignoring them")
    tool_call_parser: str = option(
        "auto",
        choices_from="jaxserve.frontend.parsers.formats:tool_call_parsers",
        help="format of the model's tool calls; auto: as its chat template shows; none: refuse tools",
    )
    reasoning_parser: str = option(
        "auto",
        choices_from="jaxserve.frontend.parsers.formats:reasoning_parsers",
        help="format of the model's reasoning; auto: as its chat template shows; none: reasoning is content",
    )
    shutdown_timeout: float = option(30.0, ge=0, help="seconds in-flight requests may take after SIGTERM")
    engine_restarts: int = option(
        3, ge=0, help="times within 10 minutes that an engine that died is started again; beyond that the server exits"
    )
    stall_timeout: float = option(
        60.0,
        ge=0,
        help="seconds of silence that make a busy engine sick (/health 503); after twice as long any is killed; 0: never",
    )
    max_body_size: int = option(8 << 20, ge=1024, unit="bytes", help="largest request body")
    sse_keep_alive: float = option(15.0, ge=0, help="seconds between keep-alive comments on an idle stream; 0: none")
    max_connections: int = option(4096, ge=1, help="open HTTP connections; on further ones requests get 503")
    api_processes: int = option(
        1, ge=1, le=512, help="processes that answer HTTP on the port; limits on requests and connections are divided"
    )
    log_level: LogLevel = option("info", help="least severe records to log")
    log_format: LogFormat = option("text", help="of what a server prints; json: an object in each line")
    profile_dir: str | None = option(
        None, help="where /start_profile and /stop_profile write profiles (default: nowhere)"
    )
    uds_dir: str | None = option(None, help="directory for the IPC sockets (default: a private one under /tmp)")


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionConfig:
    """How much and how long one connection may send."""

    max_request_line: int = option(8 << 10, ge=1024, unit="bytes", help="longest request line; longer ones get 431")
    max_header_size: int = option(16 << 10, ge=1024, unit="bytes", help="longest header; longer ones get 431")
    max_headers: int = option(128, ge=16, help="headers of a request; more get 400")
    header_timeout: float = option(30.0, ge=0.01, help="seconds in which the headers of the first request must arrive")
    body_timeout: float = option(60.0, ge=0.01, help="seconds in which a body must arrive")
    write_timeout: float = option(60.0, ge=0.01, help="seconds after which a client that takes nothing counts as gone")
    keep_alive_timeout: float = option(75.0, ge=0.01, help="seconds that a connection may be idle between two requests")


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredConfig:
    """Grammars that replies are held to."""

    max_grammar_size: int = option(
        64 << 10, ge=1, unit="bytes", help="largest JSON schema, regex or grammar of a request"
    )
    max_grammar_depth: int = option(64, ge=1, le=512, help="how deep the JSON of a schema may be nested")
    grammar_timeout: float = option(
        2.0, ge=0.1, le=60, help="processor seconds that the check of one grammar may take, in a process of its own"
    )
    grammar_memory: int = option(
        2 << 30, ge=256 << 20, unit="bytes", help="address space that the check of one grammar may add to its process"
    )
    max_grammar_states: int = option(50_000, ge=100, help="states that the lexer of one grammar may grow to")


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitsConfig:
    """How much one request may ask for; more is answered 400."""

    max_choices: int = option(128, ge=1, help="replies to one prompt (`n`)")
    max_prompts: int = option(256, ge=1, help="prompts of one request")
    max_total_choices: int = option(1024, ge=1, help="prompts times `n` of one request")
    max_inputs: int = option(2048, ge=1, help="texts of one request for embeddings, or documents of one for scores")
    max_input_tokens: int = option(300_000, ge=1, help="tokens of all these texts together")
    max_messages: int = option(10_000, ge=1, help="messages of a conversation")
    max_stop_strings: int = option(16, ge=1, help="stop strings")
    max_stop_chars: int = option(1024, ge=1, help="characters of one stop string")
    max_stop_token_ids: int = option(128, ge=0, help="stop tokens")
    max_top_logprobs: int = option(
        MAX_TOP_LOGPROBS, ge=0, le=MAX_TOP_LOGPROBS, help="most likely tokens told in one place of a text"
    )
    max_logit_bias: int = option(MAX_LOGIT_BIAS, ge=0, le=MAX_LOGIT_BIAS, help="tokens with a bias")
    max_bad_words: int = option(128, ge=0, le=MAX_BAD_WORDS, help="words that may not occur")
    max_bad_word_chars: int = option(256, ge=1, help="characters of one of them")
    max_tools: int = option(128, ge=0, help="functions that the model may call")
    max_function_chars: int = option(65_536, ge=1, help="characters of the definition of one of them, as JSON")
    max_template_kwargs_chars: int = option(16_384, ge=2, help="characters of `chat_template_kwargs`, as JSON")


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponsesConfig:
    """Responses of /v1/responses that are kept for later requests, in memory."""

    max_stored_responses: int = option(
        1024, ge=0, help="responses that are kept; the one that nobody used for longest goes first; 0: none"
    )
    max_stored_bytes: int = option(64 << 20, ge=0, unit="bytes", help="bytes that the responses kept may take")
    response_ttl: float = option(3600.0, ge=0, help="seconds that a response is kept after its last use")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All settings of one server."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    structured: StructuredConfig = field(default_factory=StructuredConfig)
    connection: ConnectionConfig = field(default_factory=ConnectionConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    responses: ResponsesConfig = field(default_factory=ResponsesConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    def __post_init__(self) -> None:
        tokens, seqs = self.scheduler.max_num_batched_tokens, self.scheduler.max_num_seqs
        if tokens is not None and seqs is not None and tokens < seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {tokens} must be at least --max-num-seqs {seqs}: "
                "every running request needs one token a step"
            )
