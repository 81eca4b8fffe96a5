"""A server with a certificate: several API processes, its commands, and a renewed certificate."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.http_server import SOURCES, running, until

if TYPE_CHECKING:
    import trustme

pytestmark = pytest.mark.slow


def write_pair(certificate: trustme.LeafCert, folder: Path) -> dict[str, str]:
    chain, key = folder / "chain.pem", folder / "key.pem"
    chain.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    certificate.private_key_pem.write_to_path(key)
    return {"ssl_certfile": str(chain), "ssl_keyfile": str(key)}


def serial(port: int, trust: ssl.SSLContext) -> object:
    """Return the serial number of the certificate that a new connection gets."""
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        trust.wrap_socket(plain, server_hostname="127.0.0.1") as tls,
    ):
        certificate = tls.getpeercert()
        assert certificate is not None
        return certificate["serialNumber"]


def test_every_api_process_has_the_certificate_and_reads_it_again(tmp_path: Path) -> None:
    import trustme

    authority, trust = trustme.CA(), ssl.create_default_context()
    authority.configure_trust(trust)
    files = write_pair(authority.issue_cert("127.0.0.1"), tmp_path)
    with running(tls=files, server={"api_processes": 2, "uds_dir": str(tmp_path)}) as server:
        assert "jaxserve is ready at https://127.0.0.1:" in server.output
        variables = {"JAXSERVE_SSL_CERTFILE": files["ssl_certfile"], "JAXSERVE_PORT": str(server.port)}
        for words, code in ((["health"], 0), (["health", "--url", f"https://127.0.0.1:{server.port}"], 1)):
            done = subprocess.run(
                [sys.executable, "-m", "jaxserve.cli.main", *words],
                env=os.environ | variables | {"PYTHONPATH": SOURCES},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == code, done.stderr
        old = serial(server.port, trust)
        write_pair(authority.issue_cert("127.0.0.1"), tmp_path)
        os.kill(server.process.pid, signal.SIGHUP)
        until(lambda: server.output.count("new connections get the certificate") == 2, "no line of each process")
        found = {serial(server.port, trust) for _ in range(8)}
        assert len(found) == 1 and old not in found
        assert server.stop() == 0
