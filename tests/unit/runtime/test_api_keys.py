"""Keys come from a setting and from a file; a slip never opens the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError
from jaxserve.http.api_keys import api_keys
from jaxserve.runtime.api_process import is_local


def test_keys_of_setting_and_file_are_taken_together(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# the team\nfirst , key\n\n  second#not-a-comment  \n  # another\nzwölf\n", encoding="utf-8")
    server = ServerConfig(api_key="a, b,", api_key_file=str(file))
    assert api_keys(server) == ["a", "b", "first , key", "second#not-a-comment", "zwölf"]
    assert api_keys(ServerConfig()) == []


@pytest.mark.parametrize(("content", "reason"), [(b"# nothing\n\n", "holds no key"), (b"\xff\xfe", "not UTF-8")])
def test_a_file_without_keys_is_a_failed_start(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^--api-key-file .*keys: {reason}$"):
        api_keys(ServerConfig(api_key_file=str(file)))


def test_a_missing_file_and_an_empty_key_are_failed_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--api-key-file .*: No such file or directory$"):
        api_keys(ServerConfig(api_key_file=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match=r"^--api-key: holds no key$"):
        api_keys(ServerConfig(api_key=" , "))


def test_requests_through_a_proxy_are_not_this_hosts_own() -> None:
    assert is_local(ServerConfig()) and is_local(ServerConfig(host="::1"))
    assert not is_local(ServerConfig(behind_proxy=True))
    assert not is_local(ServerConfig(host="0.0.0.0"))
