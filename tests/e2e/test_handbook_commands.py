"""Commands of the handbook that ask a running server, its operator's socket and its process."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.documented_commands import ROOT, shown_in
from tests.e2e.http_server import Server, running

pytestmark = pytest.mark.slow


def shown(page: str, begin: str) -> list[str]:
    """Return the commands of a page that begin with these words."""
    found = [line for line in shown_in(ROOT / "docs" / f"{page}.md") if line.startswith(f"{begin} ")]
    assert found
    return found


def run(command: str, folder: Path) -> str:
    """Return what a command prints. Skips the test if its program is missing."""
    program = shlex.split(command)[0]
    if shutil.which(program) is None:
        pytest.skip(f"no {program} on this machine")
    done = subprocess.run(["sh", "-c", command], cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@dataclass(frozen=True, slots=True)
class Served:
    """A server with the key file of the page on security, in its folder."""

    server: Server
    folder: Path

    @property
    def socket(self) -> Path:
        return self.folder / "admin.sock"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    (keys,) = shown("security", "printf")
    run(keys, folder)
    section = {"api_key_file": str(folder / "keys.txt"), "admin_socket": str(folder / "admin.sock")}
    with running(server=section) as server:
        yield Served(server, folder)


def test_the_key_file_has_a_key_for_each_team_and_is_private(served: Served) -> None:
    assert (served.folder / "keys.txt").stat().st_mode & 0o777 == 0o600
    statuses = {}
    for key in ("key-one", "key-two", "# team A"):
        served.server.api_key = key
        statuses[key] = served.server.request("GET", "/v1/models")[0]
    assert statuses == {"key-one": 200, "key-two": 200, "# team A": 401}


def test_curl_asks_the_server_without_a_key_and_the_socket_of_the_operator(served: Served) -> None:
    replies = [run(f"{line.replace('http://HOST:8000', served.server.url)} --fail", served.folder) for line in shown("runbook", "curl")]  # fmt: skip
    assert len(replies) >= 2 and all('"status"' in reply for reply in replies), replies
    for line in shown("security", "curl --unix-socket"):
        run(f"{line.replace('/run/jaxserve/admin.sock', str(served.socket))} --fail", served.folder)


@pytest.mark.parametrize(("begin", "printed"), [("ls -l", "socket:"), ("py-spy dump", "Thread")])
def test_the_process_can_be_looked_at(served: Served, begin: str, printed: str) -> None:
    (line,) = shown("runbook", begin)
    assert printed in run(line.replace("PID", str(served.server.process.pid)), served.folder)
