"""State that HTTP requests share. Made once before the application starts; none of it is replaced later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from aiohttp import web

from jaxserve.apis.responses.service import ResponseService
from jaxserve.config import ConnectionConfig
from jaxserve.frontend.frontend import ServedModels
from jaxserve.frontend.peers import PeerProcesses
from jaxserve.http.access import CorsPolicy, KeyRing
from jaxserve.http.body_budget import BodyBudget
from jaxserve.http.operations.startup import StartupLog
from jaxserve.http.rejections import RejectionLog
from jaxserve.http.tracing import Tracing


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """The models and the settings of the HTTP side."""

    models: ServedModels
    startups: Mapping[str, StartupLog]
    """The start of each model, by its first name."""
    keys: KeyRing
    peers: PeerProcesses
    responses: ResponseService
    connection: ConnectionConfig
    is_strict: bool = False
    """True: unknown fields are rejected."""
    allows_commands: bool = True
    """True: everybody who may send requests may run the operator's commands."""
    is_local: bool = False
    """True: the server listens on a loopback address, so pages of other hosts have no reason to call it."""
    logs_access: bool = False
    """True: every request is logged."""
    bodies: BodyBudget = field(default_factory=BodyBudget)
    has_public_metrics: bool = False
    """True: /metrics needs no key."""
    allows_weight_updates: bool = False
    """True: the operator's commands may pause the engine and change its weights."""
    cors: CorsPolicy = field(default_factory=CorsPolicy)
    max_body_size: int
    keep_alive_s: float
    rejections: RejectionLog = field(default_factory=RejectionLog)
    has_page: bool = False
    """True: the page at `/` is served."""
    tracing: Tracing | None = None


STATE = web.AppKey("state", ServerState)
