"""What the endpoints share. Made once before the application starts; nothing in it is replaced later."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from jaxserve import __version__
from jaxserve.apis.responses.service import ResponseService
from jaxserve.apis.schema.decode import shorten
from jaxserve.config import ConnectionConfig, LimitsConfig
from jaxserve.errors import ModelNotFoundError
from jaxserve.frontend.engine_client.client import EngineClient
from jaxserve.frontend.grammars.checker import GrammarChecker
from jaxserve.frontend.peers import PeerProcesses
from jaxserve.frontend.seeds import SeedStream
from jaxserve.frontend.tokenization import Tokenization
from jaxserve.http.auth import KeyRing
from jaxserve.http.cors import CorsPolicy
from jaxserve.http.operations.startup import StartupLog
from jaxserve.ipc.messages import ModelInfo
from jaxserve.metrics import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """Collaborators and settings of the HTTP side."""

    model_names: tuple[str, ...]
    """Names a request may use; the first is echoed."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Further such names, of adapters, and where each was found; in the order in which the engine counts them from 1."""
    client: EngineClient
    tokenization: Tokenization
    metrics: Metrics
    keys: KeyRing
    seeds: SeedStream
    peers: PeerProcesses
    grammars: GrammarChecker
    limits: LimitsConfig
    responses: ResponseService
    connection: ConnectionConfig
    is_strict: bool = False
    """Whether fields that nobody knows are refused."""
    cors: CorsPolicy = field(default_factory=CorsPolicy)
    max_body_size: int
    keep_alive_s: float
    startup: StartupLog = field(default_factory=StartupLog)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    def require_model(self, name: str | None) -> None:
        """Raise ModelNotFoundError for a model we do not serve; a request may leave its name out."""
        names = (*self.model_names, *self.adapters)
        if name is not None and name not in names:
            raise ModelNotFoundError(
                f"The model `{shorten(name)[1:-1]}` does not exist. Served here: {', '.join(names)}.",
                param="model",
            )

    def adapter_of(self, name: str | None) -> int:
        """What the engine calls the adapter of this name; 0 for any other model."""
        return 0 if name is None or name not in self.adapters else 1 + list(self.adapters).index(name)

    def shown_name(self, name: str | None) -> str:
        """What a reply calls the model that a request names."""
        return name if name is not None and name in self.adapters else self.model_name

    def heading(self, prefix: str, model_info: ModelInfo, asked: str | None) -> dict[str, Any]:
        """What all chunks and the reply of one request for the model `asked` begin with; the id with `prefix`."""
        return {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self.shown_name(asked),
            # Changes when weights, precision, mesh or versions do.
            "system_fingerprint": f"jaxserve-{__version__}-{model_info.fingerprint}",
        }


STATE = web.AppKey("state", ServerState)
