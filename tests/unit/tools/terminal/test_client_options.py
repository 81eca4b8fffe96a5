"""The server that `jaxserve chat MODEL` and `jaxserve complete MODEL` start."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Mapping, Sequence

import pytest

from jaxserve.tools.terminal import client_options
from jaxserve.tools.terminal.local_server import LocalServer


def test_the_own_server_gets_no_settings_of_a_public_one(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Mapping[str, str]] = []

    @contextlib.contextmanager
    def local_server(words: Sequence[str], environment: Mapping[str, str]) -> Iterator[LocalServer]:
        given.append(environment)
        yield LocalServer("http://127.0.0.1:1", "key")

    monkeypatch.setattr(client_options, "local_server", local_server)
    public = ("SSL_CERTFILE", "SSL_KEYFILE", "SSL_CA_CERTS", "API_KEY_FILE", "ADMIN_SOCKET")
    for name in (*public, "MAX_NUM_SEQS"):
        monkeypatch.setenv(f"JAXSERVE_{name}", "7")
    with client_options._server(argparse.Namespace(path="m"), []):
        pass
    assert [name for name in (*public, "MAX_NUM_SEQS") if f"JAXSERVE_{name}" in given[0]] == ["MAX_NUM_SEQS"]
