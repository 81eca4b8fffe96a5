"""All settings of one server, and the checks of those that exclude each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxserve.config.cache import CacheConfig, TierConfig
from jaxserve.config.compile import CompileConfig
from jaxserve.config.devices import HostsConfig, ParallelConfig
from jaxserve.config.hosts import check_hosts
from jaxserve.config.images import ImagesConfig
from jaxserve.config.memory import MemoryConfig
from jaxserve.config.model import ModelConfig
from jaxserve.config.recorder import RecorderConfig
from jaxserve.config.requests import LimitsConfig, ResponsesConfig, StructuredConfig
from jaxserve.config.scheduler import SchedulerConfig
from jaxserve.config.server import ConnectionConfig, ServerConfig
from jaxserve.config.tls import TlsConfig
from jaxserve.errors import ConfigError


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
