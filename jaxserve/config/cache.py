"""Settings of the KV cache and of the tiers that evicted pages are kept in."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from jaxserve.config.hosts import host_and_port
from jaxserve.config.option import option
from jaxserve.errors import ConfigError

KVCacheDtype = Literal["auto", "fp8", "int8"]
KVFetch = Literal["auto", "always"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int | None = option(None, ge=1, le=1024, help="tokens per KV page (default: 64 on TPUs, 16 elsewhere)")
    kv_cache_memory: int | None = option(
        None,
        ge=1,
        unit="bytes",
        help="bytes for the KV cache, e.g. 2GiB (default: on accelerators from --memory-fraction; on CPUs a quarter of the "
        "memory that weights leave free, but no more than 2GiB or a request of the whole context takes)",
    )
    memory_fraction: float = option(
        0.9, ge=0.01, le=0.99, help="fraction of the accelerator's memory to use if --kv-cache-memory is not set"
    )
    kv_cache_dtype: KVCacheDtype = option(
        "auto",
        help="auto: the model's dtype, float32 on CPUs; fp8: 8-bit floats (e4m3), with the checkpoint's scales if it has some; "
        "int8: 8-bit integers, with scales that the checkpoint has or that are measured at load",
    )
    enable_prefix_caching: bool = option(True, help="reuse KV pages of prompts with a common prefix")
    publish_pages: bool = option(
        False, help="report the hashes of cached pages at /routing, for routers before several servers"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TierConfig:
    """KV pages outside of the device."""

    kv_offload_memory: int = option(
        0,
        ge=0,
        unit="bytes",
        help="bytes of host memory for copies of KV pages: a prefix that was evicted from the device comes back from "
        "there; 0: none",
    )
    kv_offload_dir: str | None = option(
        None,
        unit="path",
        help="directory for copies of KV pages, ours alone (mode 0700): they survive a restart (default: none)",
    )
    kv_offload_disk: int = option(
        16 << 30, ge=1, unit="bytes", help="bytes of the files of each engine in --kv-offload-dir"
    )
    kv_listen: str | None = option(
        None,
        help="HOST:PORT, loopback or private, where other engines of the same model fetch pages from host memory and disk; "
        "with --replicas the port of the first, followed by those of the others (default: nowhere)",
    )
    kv_peers: str | None = option(
        None,
        help="HOST:PORT of --kv-listen of other engines, comma separated: pages are fetched from them; a name stands for "
        "all its addresses, which may change; an engine leaves out its own",
    )
    kv_peer_token: str | None = option(
        None,
        secret=True,
        help="shared secret of engines that exchange pages: their connections are encrypted with it; needed beyond this host",
    )
    kv_fetch: KVFetch = option(
        "auto",
        help="auto: bring pages back only if that is measured to be faster than computing them; always: whenever there "
        "are any",
    )
    kv_fetch_timeout: float = option(
        2.0, ge=0.01, help="seconds without a page after which a fetch is given up, and the prefix is computed"
    )

    def __post_init__(self) -> None:
        for address in self.peers:
            host_and_port("--kv-peers", address)
        if self.kv_listen is not None:
            host_and_port("--kv-listen", self.kv_listen)
            if not self.kv_offload_memory and self.kv_offload_dir is None:
                raise ConfigError(
                    "--kv-listen needs --kv-offload-memory or --kv-offload-dir: peers get pages from there"
                )

    @property
    def peers(self) -> list[str]:
        """Addresses of `kv_peers`, but that of `kv_listen`: replicas that have the same settings are peers of each other."""
        entries = [entry.strip() for entry in (self.kv_peers or "").split(",")]
        return [entry for entry in entries if entry and entry != self.kv_listen]

    @property
    def has_stores(self) -> bool:
        """True if pages are copied from or to the device."""
        return bool(self.settings)

    @property
    def are_shared(self) -> bool:
        """True if pages outlive the engine, or move between engines."""
        return any((self.kv_offload_dir, self.kv_listen, self.kv_peers))

    def for_replica(self, replica: int) -> TierConfig:
        """Return the settings of one of several engines on this host: each listens on a port of its own. Raises ConfigError."""
        if self.kv_listen is None:
            return self
        host, _, port = self.kv_listen.rpartition(":")
        return dataclasses.replace(self, kv_listen=f"{host}:{int(port) + replica}")

    @property
    def settings(self) -> list[str]:
        """Flags that are given and make pages move."""
        values = (self.kv_offload_memory, self.kv_offload_dir, self.kv_listen, self.kv_peers)
        flags = ("--kv-offload-memory", "--kv-offload-dir", "--kv-listen", "--kv-peers")
        return [flag for flag, value in zip(flags, values, strict=True) if value]
