"""Keys of the ingress, whose replicas read the file of the keys at another time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve.errors import AuthenticationError
from jaxserve.ray.access import IngressKeys
from jaxserve.ray.settings import read_arguments
from tests.e2e.http_server import TOKENIZER


def write(path: Path, *names: str) -> None:
    path.write_text(json.dumps([{"key": f"key-of-{name}", "name": name} for name in names]))


def test_keys_that_are_added_to_the_file_are_accepted_and_old_ones_are_left_to_the_replica(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    write(path, "a")
    keys = IngressKeys(read_arguments({"model": str(TOKENIZER), "api_key_file": str(path)}).config)

    def tenant(name: str) -> str:
        found = keys.check({"X-Api-Key": f"key-of-{name}"})
        assert found is not None
        return found.record.name

    assert tenant("a") == "a"
    for text in ("[", "[]"):
        path.write_text(text)
        with pytest.raises(AuthenticationError):
            tenant("bb")
    path.unlink()
    with pytest.raises(AuthenticationError):
        tenant("bb")
    write(path, "bb")
    assert [tenant("bb"), tenant("a")] == ["bb", "a"]
    with pytest.raises(AuthenticationError):
        tenant("c")


def test_an_application_without_keys_is_open() -> None:
    keys = IngressKeys(read_arguments({"model": str(TOKENIZER)}).config)
    assert keys.check({}) is None
    assert keys.check({"Authorization": "Bearer any"}) is None
