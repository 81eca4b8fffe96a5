"""Interface of a compared server: installation, start and requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.peers.weights import Weights

HOST = "127.0.0.1"
MODEL_NAME = "m"
"""Model name that every server is started with."""
MAX_MODEL_LEN = 8192
MAX_NUM_SEQS = 32


class PeerUnavailableError(Exception):
    """A server cannot be installed or started here; the text is one readable line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Command and requests of one server."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """On top of the caller's."""
    ready_path: str = "/health"
    """Answers 200 once requests are served."""
    model: str = MODEL_NAME
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Fields that every request to this server needs on top; None takes one out."""


class Peer(Protocol):
    """One server program. Everything it installs stays in the folder it was made with."""

    @property
    def name(self) -> str: ...

    @property
    def formats(self) -> tuple[str, ...]:
        """Formats of weights, the first one float32."""
        ...

    def install(self) -> None:
        """Make it usable; returns at once when it is. Raises PeerUnavailableError."""
        ...

    def prepare(self, weights: Weights, format_name: str) -> None:
        """Make the copy of the weights that it reads, where that is missing. After `install`."""
        ...

    def launch(self, weights: Weights, format_name: str, *, port: int, cpus: tuple[int, ...]) -> Launch:
        """`format_name` is one of `formats`, prepared; `cpus` are the cores it may use."""
        ...

    def versions(self) -> Mapping[str, str]:
        """Return the versions of all that affects its speed; call after `install`."""
        ...


@dataclass(frozen=True, slots=True)
class Entrant:
    """A peer with one format of weights."""

    peer: Peer
    format_name: str

    @property
    def label(self) -> str:
        """Its name, with the format where there are several."""
        return f"{self.peer.name}:{self.format_name}" if len(self.peer.formats) > 1 else self.peer.name


def parse_entrant(text: str, peers: Mapping[str, Peer]) -> Entrant:
    """`NAME` or `NAME:FORMAT`. Raises ValueError naming what there is."""
    name, _, format_name = text.partition(":")
    if name not in peers:
        raise ValueError(f"{text!r}: no such peer, choose from {', '.join(peers)}")
    peer = peers[name]
    if format_name and format_name not in peer.formats:
        raise ValueError(f"{text!r}: {name} runs {', '.join(peer.formats)}")
    return Entrant(peer, format_name or peer.formats[0])
