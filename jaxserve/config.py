"""Every setting of the server, declared once: here, or in the modules `config_*`, whose names are exported here.

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
from jaxserve.config_requests import LimitsConfig as LimitsConfig
from jaxserve.config_requests import ResponsesConfig as ResponsesConfig
from jaxserve.config_requests import StructuredConfig as StructuredConfig
from jaxserve.config_server import ConnectionConfig as ConnectionConfig
from jaxserve.config_server import LogFormat as LogFormat
from jaxserve.config_server import LogLevel as LogLevel
from jaxserve.config_server import ServerConfig as ServerConfig
from jaxserve.config_tls import TlsConfig as TlsConfig
from jaxserve.errors import ConfigError
from jaxserve.host_settings import check_hosts
from jaxserve.types import LogprobsMode

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
CpuKernels = Literal["auto", "native", "matrix", "vector", "xla"]
Warmup = Literal["auto", "all"]
AttentionBackend = Literal["auto", "reference", "pallas"]
Task = Literal["auto", "generate", "embed"]
SchedulingPolicy = Literal["fair", "fcfs", "priority"]
SpeculativeMethod = Literal["auto", "mtp"]
PoolingChoice = Literal["auto", "last", "mean", "cls"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The model and its precision."""

    model: str = option(help="GGUF file, Hugging Face directory, hub id (`owner/name`), or `default`")
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
        "-weight-only: weights only; int4 has one scale per group of inputs, fp8-block one per block; mxfp4: experts in blocks of 32; nvfp4: blocks of 16; gguf: the blocks of a GGUF file, and int8 "
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
    enable_return_routed_experts: bool = option(
        False, help="let requests ask for the experts that their tokens chose (`return_routed_experts`)"
    )
    task: Task = option("auto", help="generate: text; embed: vectors of texts; auto: embed for encoders, else generate")
    pooling: PoolingChoice = option(
        "auto",
        help="how a text's vector is made from its tokens' vectors; auto: the checkpoint's modules.json, else last for "
        "decoders and mean for encoders",
    )

    classifier_from_token: str | None = option(
        None,
        help="score texts with a model that generates: two tokens, separated by a comma, of which the logit of the first (no) "
        "is subtracted from that of the second (yes), or one token; implies --task embed",
    )

    def __post_init__(self) -> None:
        count = len(self.adapters)
        if self.max_lora_rank is not None and self.max_loras is None:
            raise ConfigError(f"--max-lora-rank {self.max_lora_rank}: needs --max-loras")
        if self.max_loras is not None and count > self.max_loras:
            raise ConfigError(f"--max-loras {self.max_loras}: --lora-modules has {count} adapters")
        if self.classifier_from_token is not None and not 1 <= len(self.classifier_from_token.split(",")) <= 2:
            raise ConfigError("--classifier-from-token: expected one token, or two separated by a comma")
        if self.task == "generate":
            self.check_generates()

    @property
    def adapters(self) -> dict[str, str]:
        """Path of each adapter of `lora_modules`, by name."""
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
        """Number of adapters that can be loaded at the same time."""
        return len(self.adapters) if self.max_loras is None else self.max_loras

    def check_generates(self) -> None:
        """Raise ConfigError for settings that need the task `embed`."""
        if self.task == "embed":
            raise ConfigError("--task embed: `compile` and `convert` support the task generate only")
        if self.pooling != "auto":
            raise ConfigError(f"--pooling {self.pooling}: needs --task embed")
        if self.classifier_from_token is not None:
            raise ConfigError(f"--classifier-from-token {self.classifier_from_token}: not with --task generate")


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
        help="most milliseconds of decode steps in one call (multi-step decode) while no request waits, which a new request "
        "waits for; 0: one step per call",
    )
    num_speculative_tokens: int = option(
        0, ge=0, le=64, help="most draft tokens per request and step, see --speculative-method; 0: none"
    )
    speculative_method: SpeculativeMethod = option(
        "auto",
        help="where draft tokens come from; auto: --speculative-model if it is given, else the request's text; mtp: the "
        "multi-token-prediction layer of the model's checkpoint",
    )
    speculative_model: str | None = option(
        None,
        help="smaller model with the same tokenizer, EAGLE-3 head of the model or drafter of a Gemma 4, that drafts: directory, GGUF file or hub id (default: none)",
    )

    def __post_init__(self) -> None:
        if self.speculative_method == "mtp" and self.speculative_model is not None:
            raise ConfigError(
                f"--speculative-method mtp: not with --speculative-model {self.speculative_model}; one of them drafts"
            )
        if self.drafter is not None and not self.num_speculative_tokens:
            start = 1 if self.speculative_method == "mtp" else 3
            raise ConfigError(
                f"{self.drafter}: set --num-speculative-tokens, the tokens of a draft; {start} is a good start"
            )

    @property
    def drafter(self) -> str | None:
        """Flag that chooses what drafts on the device: a draft model or a multi-token-prediction layer; None if nothing does."""
        if self.speculative_method == "mtp":
            return "--speculative-method mtp"
        return None if self.speculative_model is None else f"--speculative-model {self.speculative_model}"

    @property
    def has_drafter(self) -> bool:
        """True if a draft model or a multi-token-prediction layer drafts on the device."""
        return self.drafter is not None

    @property
    def has_priorities(self) -> bool:
        """True if requests may have a priority."""
        return self.scheduling_policy != "fcfs"


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileConfig:
    """Programs, kernels and the compile cache."""

    attention_backend: AttentionBackend = option(
        "auto",
        help="paged-attention kernel; auto: pallas on TPUs and on GPUs from Ampere on, native kernels on CPUs if they are built, "
        "else reference (XLA)",
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
        "--quantization none, int8, mxfp4-weight-only or nvfp4-weight-only",
    )
    warmup: Warmup = option(
        "auto",
        help="programs that the server loads or compiles before it is ready; all: every one; auto: all, but with native CPU kernels "
        "and one host only the largest of each kind, which serve any step, while the smaller ones follow beside requests",
    )
    compile_cache: str | None = option(
        None,
        help="directory of compiled programs, at most 2GiB (default: jaxserve/programs in $XDG_CACHE_HOME or ~/.cache; "
        "`off`: none)",
    )

    def __post_init__(self) -> None:
        if self.needs_cpu_kernels and self.attention_backend != "auto":
            raise ConfigError(
                f"--cpu-kernels {self.cpu_kernels} and --attention-backend {self.attention_backend} exclude each other"
            )

    @property
    def needs_cpu_kernels(self) -> bool:
        """True if an engine without native kernels does not start."""
        return self.cpu_kernels not in ("auto", "xla")


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
        self.tiers.for_replica(self.parallel.replicas - 1)  # the last one has a port
        if self.compile.needs_cpu_kernels and self.parallel.num_devices > 1:
            raise ConfigError(
                f"--cpu-kernels {self.compile.cpu_kernels}: only on one CPU device, not on {self.parallel.num_devices}"
            )
        if self.compile.deterministic and self.scheduler.drafter is not None:
            raise ConfigError(f"{self.scheduler.drafter}: not with --deterministic, with which it was not tested")
        if self.model.task == "embed":
            self.check_embeds()
        if self.images.enable_prompt_embeds:
            self._check_prompt_embeds()
        if self.tiers.has_stores:
            flags = ", ".join(self.tiers.settings)
            if self.model.enable_return_routed_experts:
                raise ConfigError(
                    f"{flags}: not with --enable-return-routed-experts, pages come back without their experts"
                )
            if not self.cache.enable_prefix_caching:
                raise ConfigError(f"{flags}: needs --enable-prefix-caching, pages come back by their prefix")
            if self.hosts.num_hosts > 1:
                raise ConfigError(f"{flags}: not with --num-hosts {self.hosts.num_hosts}, pages lie on one host")

    def _check_prompt_embeds(self) -> None:
        hosts, ranks = self.hosts.num_hosts, self.parallel.data_parallel_size
        drafts = self.scheduler.num_speculative_tokens
        for flag, is_set in (
            (f"--num-hosts {hosts}", hosts > 1),
            (f"--data-parallel-size {ranks}", ranks > 1),
            (f"--num-speculative-tokens {drafts}", drafts > 0),
            ("--deterministic", self.compile.deterministic),
            (", ".join(self.tiers.settings), self.tiers.has_stores),
        ):
            if is_set:
                raise ConfigError(f"{flag}: not with --enable-prompt-embeds")

    def check_embeds(self) -> None:
        """Raise ConfigError for settings that only an engine that generates has."""
        if self.scheduler.drafter is not None:
            raise ConfigError(f"{self.scheduler.drafter}: an engine that embeds drafts no tokens")
        if self.model.num_adapter_places:
            raise ConfigError("--lora-modules, --max-loras: adapters of models that embed are not served")
        if self.images.enable_prompt_embeds:
            raise ConfigError("--enable-prompt-embeds: not with a model that embeds texts")
        if self.model.logprobs_mode != "raw_logprobs":
            raise ConfigError(
                f"--logprobs-mode {self.model.logprobs_mode}: a model that embeds returns no log-probabilities"
            )
        if self.cache.kv_cache_dtype == "int8":
            raise ConfigError("--kv-cache-dtype int8: an engine that embeds keeps no KV cache")
        if self.tiers.has_stores:
            raise ConfigError(f"{', '.join(self.tiers.settings)}: an engine that embeds keeps no KV pages")
        if (num_ranks := self.parallel.data_parallel_size) > 1:
            raise ConfigError(
                f"--data-parallel-size {num_ranks}: a model that embeds keeps no KV cache to divide; use 1"
            )
