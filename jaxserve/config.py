"""Every setting of the server, declared once: here, or in the modules of devices, caches and images, whose names are exported here.

The CLI flag (`--max-num-seqs`), the key of a YAML file (`max_num_seqs`), the environment variable
(`JAXSERVE_MAX_NUM_SEQS`) and the reference page derive from a field and its help text. Configs are frozen: made once,
resolved once, printed at start.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jaxserve.config_cache import CacheConfig as CacheConfig
from jaxserve.config_cache import KVCacheDtype as KVCacheDtype
from jaxserve.config_cache import KVFetch as KVFetch
from jaxserve.config_cache import TierConfig as TierConfig
from jaxserve.config_devices import ExpertExchange as ExpertExchange
from jaxserve.config_devices import HostsConfig as HostsConfig
from jaxserve.config_devices import ParallelConfig as ParallelConfig
from jaxserve.config_devices import Placement as Placement
from jaxserve.config_devices import Routing as Routing
from jaxserve.config_images import ImagesConfig as ImagesConfig
from jaxserve.config_memory import MemoryConfig as MemoryConfig
from jaxserve.config_option import option
from jaxserve.config_recorder import RecorderConfig as RecorderConfig
from jaxserve.config_tls import TlsConfig as TlsConfig
from jaxserve.errors import ConfigError
from jaxserve.host_settings import check_hosts
from jaxserve.types import MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_TOP_LOGPROBS, LogprobsMode

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
CpuKernels = Literal["auto", "native", "matrix", "vector", "xla"]
AttentionBackend = Literal["auto", "reference", "pallas"]
Task = Literal["auto", "generate", "embed"]
SchedulingPolicy = Literal["fair", "fcfs", "priority"]
PoolingChoice = Literal["auto", "last", "mean", "cls"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The model and its precision."""

    model: str = option(help="GGUF file, Hugging Face directory, or hub id (`owner/name`)")
    revision: str | None = option(None, help="hub branch, tag or commit")
    served_model_name: str | None = option(
        None, help="names that requests may use, comma separated; replies have the first one (default: MODEL)"
    )
    lora_modules: str | None = option(
        None,
        help="LoRA adapters to serve with the model, NAME=PATH (a folder saved by PEFT, or a hub id), comma "
        "separated; a request selects one with its name as `model`",
    )
    max_loras: int | None = option(
        None,
        ge=1,
        le=1024,
        help="places for LoRA adapters, those of --lora-modules among them; adapters that are loaded while serving take "
        "the others (default: as many as --lora-modules has)",
    )
    max_lora_rank: int | None = option(
        None,
        ge=1,
        le=512,
        help="largest rank of an adapter that is loaded while serving (default: 16, or that of --lora-modules)",
    )
    dtype: Dtype = option(
        "auto",
        help="type of weights and, on accelerators, of activations and KV cache (float32 on CPUs); auto: float32 on CPUs, "
        "else bfloat16",
    )
    quantization: str = option(
        "auto",
        choices_from="jaxserve.quant.names:format_names",
        help="int8, fp8 (e4m3): weights, with one scale per output, and activations, with one scale per token; "
        "-weight-only: weights only; int4 has one scale per group of inputs; gguf: the blocks of a GGUF file, and int8 "
        "activations; auto: the checkpoint's format, but GGUF files dequantised",
    )
    max_model_len: int | None = option(None, ge=1, help="longest prompt + output in tokens (default: the model's)")
    seed: int = option(0, ge=0, help="seed from which the seeds of requests without one are drawn")
    chat_template: str | None = option(None, help="path of a Jinja chat template, used instead of the model's")
    generation_config: str = option(
        "auto",
        help="source of the default temperature, top_k, top_p, min_p and repetition_penalty; auto: the checkpoint's "
        "generation_config.json; none: temperature 1, nothing else; or the path of such a file or its folder",
    )
    logprobs_mode: LogprobsMode = option("raw_logprobs", help="log-probabilities before or after sampling options")
    task: Task = option("auto", help="generate: text; embed: vectors of texts; auto: embed for encoders, else generate")
    pooling: PoolingChoice = option(
        "auto",
        help="how a text's vector is made from its tokens' vectors; auto: the checkpoint's modules.json, else last for "
        "decoders and mean for encoders",
    )

    @property
    def adapters(self) -> dict[str, str]:
        """Path of each adapter of `lora_modules`, by name. Raises ConfigError."""
        adapters: dict[str, str] = {}
        for entry in filter(None, (part.strip() for part in (self.lora_modules or "").split(","))):
            name, separator, path = (part.strip() for part in entry.partition("="))
            if not (name and separator and path):
                raise ConfigError(f"--lora-modules {entry!r}: expected NAME=PATH")
            if name in adapters:
                raise ConfigError(f"--lora-modules: two adapters have the name {name!r}")
            adapters[name] = path
        return adapters

    @property
    def num_adapter_places(self) -> int:
        """Number of adapters that can be loaded at the same time. Raises ConfigError."""
        count = len(self.adapters)
        if self.max_loras is None:
            if self.max_lora_rank is not None:
                raise ConfigError(f"--max-lora-rank {self.max_lora_rank}: needs --max-loras")
            return count
        if count > self.max_loras:
            raise ConfigError(f"--max-loras {self.max_loras}: --lora-modules has {count} adapters")
        return self.max_loras

    def check_generates(self) -> None:
        """Raise ConfigError for settings that need the task `embed`."""
        if self.task == "embed":
            raise ConfigError("--task embed: `plan` and `compile` support the task generate only")
        if self.pooling != "auto":
            raise ConfigError(f"--pooling {self.pooling}: needs --task embed")


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Limits on requests and tokens that run together."""

    max_num_seqs: int | None = option(
        None, ge=1, le=4096, help="requests that run at the same time (default: 32 on CPU, 256 on accelerators)"
    )
    max_num_batched_tokens: int | None = option(
        None, ge=1, help="tokens computed in one step (default: 128 on CPU, 2048 on accelerators)"
    )
    max_queued_requests: int = option(1024, ge=0, help="requests that may wait; further ones get 429")
    max_queued_tokens: int = option(4_194_304, ge=1, help="prompt tokens that may wait; requests beyond get 429")
    scheduling_policy: SchedulingPolicy = option(
        "fair",
        help="order of prompts; fcfs: first come, first served, requests with a priority get 400; priority: lowest "
        "`priority` first, then arrival; fair: like priority, but API keys take turns, and half of each step goes to the "
        "shortest prompts",
    )
    overlap: bool = option(True, help="dispatch the next step before the results of the last one are read")
    max_burst_ms: float = option(
        100.0,
        ge=0,
        help="most milliseconds of decode steps in one call (multi-step decode) while no request waits; 0: one step per call",
    )
    num_speculative_tokens: int = option(
        0,
        ge=0,
        le=64,
        help="most draft tokens per request and step, from repetitions in its text (prompt lookup); 0: none",
    )

    @property
    def has_priorities(self) -> bool:
        """True if requests may have a priority."""
        return self.scheduling_policy != "fcfs"


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileConfig:
    """Programs, kernels and the compile cache."""

    attention_backend: AttentionBackend = option(
        "auto",
        help="paged-attention kernel; auto: pallas on Hopper GPUs, native kernels on CPUs if they are built, else "
        "reference (XLA)",
    )
    cpu_kernels: CpuKernels = option(
        "auto",
        help="native: C++ kernels built by `python -m jaxserve_kernels.native.build`, with AMX if the processor has it and "
        "--max-num-seqs is over 4; matrix: with AMX; vector: without; xla: no native kernels; auto: native on CPUs if "
        "they are built",
    )
    try_kernels: bool = option(
        True,
        help="compare the Pallas kernels with XLA, in a separate process, before their first use; if they fail, XLA "
        "computes attention",
    )
    deterministic: bool = option(
        False,
        help="serve only if the same request gets the same bits whatever else runs: on one CPU device with native kernels, "
        "--quantization none or int8",
    )
    compile_cache: str | None = option(
        None,
        help="directory of compiled programs, at most 2GiB (default: jaxserve/programs in $XDG_CACHE_HOME or ~/.cache; "
        "`off`: none)",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """The HTTP server."""

    host: str = option("127.0.0.1", help="address to listen on; 0.0.0.0 for every interface")
    port: int = option(8000, ge=0, le=65535, help="port to listen on; 0 picks a free one")
    api_key: str | None = option(None, secret=True, help="keys, comma separated; without any the API is open")
    api_key_file: str | None = option(
        None,
        help="file with more keys, one per line, lines that begin with # are comments; or, named *.yaml or *.json, a list of "
        "keys with names and limits; read again on SIGHUP",
    )
    public_commands: bool = option(
        False,
        help="let everybody who may send requests run the operator's commands (/reset_prefix_cache, /start_profile, ...); "
        "default: keys with `is_operator`, --admin-socket and, on a loopback address without keys, everybody",
    )
    behind_proxy: bool = option(
        False,
        help="a proxy passes requests of other hosts on, though --host is a loopback address: commands are the operator's, and "
        "pages of other hosts may write, as on other addresses",
    )
    admin_socket: str | None = option(
        None, help="path of a Unix socket that answers everything without a key, for the operator (mode 0600)"
    )
    access_log: bool = option(
        False, help="log a line for each HTTP request: its id, status, time and the name of its key"
    )
    otlp_traces_endpoint: str | None = option(
        None,
        help="URL of an OpenTelemetry collector (OTLP over HTTP) that gets traces of requests; needs `jaxserve[otel]`",
    )
    public_metrics: bool = option(
        False, help="answer /metrics without a key, for endpoint pickers and monitors that cannot send one"
    )
    cors_allowed_origins: str | None = option(
        None, help="origins whose web pages may call the API, comma separated, or `*` (default: none)"
    )
    ui: bool = option(True, help="serve the page at /: a chat and a live picture of the engine")
    strict_parameters: bool = option(False, help="answer unknown request fields with 400 instead of ignoring them")
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
    shutdown_timeout: float = option(30.0, ge=0, help="seconds that running requests may take after SIGTERM")
    upgrade_timeout: float = option(
        600.0,
        ge=0,
        help="seconds that running requests may take after another process has taken the port (`jaxserve upgrade`)",
    )
    engine_restarts: int = option(
        3,
        ge=0,
        help="restarts of a dead engine within 10 minutes, and of dead API processes; after that the server exits",
    )
    startup_timeout: float = option(
        900.0,
        ge=0,
        help="seconds without progress (phases, tensors, programs) after which a starting engine is killed; 0: never",
    )
    stall_timeout: float = option(
        60.0,
        ge=0,
        help="seconds without a message after which a busy engine counts as stalled (/health and /ready 503); after twice as many "
        "any engine is killed; 0: never",
    )
    max_body_size: int = option(8 << 20, ge=1024, unit="bytes", help="largest request body")
    max_body_memory: int = option(
        256 << 20,
        ge=1024,
        unit="bytes",
        help="bytes of all request bodies that are being read or prepared; beyond, requests get 429",
    )
    sse_keep_alive: float = option(15.0, ge=0, help="seconds between keep-alive comments on an idle stream; 0: none")
    max_connections: int = option(4096, ge=1, help="open HTTP connections; requests on further ones get 503")
    api_processes: int = option(
        1,
        ge=1,
        le=512,
        help="processes that answer HTTP on the port; they divide the limits on requests and connections",
    )
    log_level: LogLevel = option("info", help="lowest level to log")
    log_format: LogFormat = option("text", help="format of the log; json: one object per line")
    profile_dir: str | None = option(None, help="directory for the profiles of /start_profile (default: none)")
    allow_weight_updates: bool = option(
        False,
        help="run the commands /update_weights, /sleep, /pause, /v1/load_lora_adapter and their opposites for any client "
        "that may send requests; they read any path that the server can read",
    )
    uds_dir: str | None = option(None, help="directory for the IPC sockets (default: a private one in /tmp)")


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionConfig:
    """Limits of size and time on one connection."""

    max_request_line: int = option(8 << 10, ge=1024, unit="bytes", help="longest request line; longer ones get 431")
    max_header_size: int = option(16 << 10, ge=1024, unit="bytes", help="longest header; longer ones get 431")
    max_headers: int = option(128, ge=16, help="headers of a request; requests with more get 400")
    header_timeout: float = option(
        30.0, ge=0.01, help="seconds in which the headers of a connection's first request must arrive"
    )
    body_timeout: float = option(60.0, ge=0.01, help="seconds in which a body must arrive")
    write_timeout: float = option(60.0, ge=0.01, help="seconds after which a client that reads nothing counts as gone")
    keep_alive_timeout: float = option(75.0, ge=0.01, help="seconds that a connection may be idle between two requests")


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All settings of one server."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    tiers: TierConfig = field(default_factory=TierConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    hosts: HostsConfig = field(default_factory=HostsConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    structured: StructuredConfig = field(default_factory=StructuredConfig)
    images: ImagesConfig = field(default_factory=ImagesConfig)
    connection: ConnectionConfig = field(default_factory=ConnectionConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    responses: ResponsesConfig = field(default_factory=ResponsesConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    recorder: RecorderConfig = field(default_factory=RecorderConfig)

    def __post_init__(self) -> None:
        tokens, seqs = self.scheduler.max_num_batched_tokens, self.scheduler.max_num_seqs
        if tokens is not None and seqs is not None and tokens < seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {tokens} must be at least --max-num-seqs {seqs}: "
                "every running request needs one token a step"
            )
        check_hosts(self.hosts, self.parallel)
        if self.tiers.has_stores:
            flags = ", ".join(self.tiers.settings)
            if not self.cache.enable_prefix_caching:
                raise ConfigError(f"{flags}: needs --enable-prefix-caching, pages come back by their prefix")
            if self.hosts.num_hosts > 1:
                raise ConfigError(f"{flags}: not with --num-hosts {self.hosts.num_hosts}, pages lie on one host")
            if self.parallel.data_parallel_size > 1:
                ranks = self.parallel.data_parallel_size
                raise ConfigError(f"{flags}: not with --data-parallel-size {ranks}, pages are of one rank")
