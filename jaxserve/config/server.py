"""Settings of the HTTP server and its connections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxserve.config.hosts import check_collector, check_host, check_origin
from jaxserve.config.option import option

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """The HTTP server."""

    host: str = option("127.0.0.1", help="address to listen on; 0.0.0.0 for every interface, :: for IPv6 and IPv4")
    port: int = option(8000, ge=0, le=65535, help="port to listen on; 0 picks a free one")
    api_key: str | None = option(None, secret=True, help="keys, comma separated; without any the API is open")
    api_key_file: str | None = option(
        None,
        unit="path",
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
        None,
        unit="path",
        help="path of a Unix socket that answers everything without a key, for the operator (mode 0600)",
    )
    access_log: bool = option(
        False, help="log a line for each HTTP request: its id, status, time, tokens and the name of its key"
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
        help="bytes of all request bodies that are being read or prepared, and of the stored responses that they continue; "
        "beyond, requests get 429",
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
    profile_dir: str | None = option(
        None, unit="path", help="directory for the profiles of /start_profile (default: none)"
    )
    allow_weight_updates: bool = option(
        False,
        help="accept the operator's commands /update_weights, /sleep, /pause, /v1/load_lora_adapter and their opposites, which "
        "read any path that the server can read; --public-commands says who may send them",
    )
    uds_dir: str | None = option(
        None, unit="path", help="directory for the IPC sockets (default: a private one in /tmp)"
    )

    def __post_init__(self) -> None:
        check_host(self.host)
        for origin in (self.cors_allowed_origins or "").split(","):
            check_origin(origin.strip())
        if self.otlp_traces_endpoint is not None:
            check_collector(self.otlp_traces_endpoint)


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
