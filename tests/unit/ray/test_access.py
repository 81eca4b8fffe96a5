"""Keys of the ingress, whose replicas read the file of the keys at another time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from jaxserve.errors import AuthenticationError, InvalidRequestError, RateLimitError
from jaxserve.ray.access import IngressBodies, IngressKeys
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


async def unending() -> AsyncIterator[bytes]:
    yield b"{"
    await asyncio.Event().wait()


async def short() -> AsyncIterator[bytes]:
    for chunk in (b"{", b"}"):
        yield chunk


async def test_a_body_that_takes_too_long_is_refused_and_gives_its_memory_back() -> None:
    settings = {"model": str(TOKENIZER), "body_timeout": 0.01, "max_body_memory": 1024}
    bodies = IngressBodies(read_arguments(settings).config)
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="--body-timeout"):
            async with bodies.read(unending(), "1024", ""):
                pass


async def test_bodies_that_are_being_read_share_the_memory_of_an_ingress() -> None:
    bodies = IngressBodies(read_arguments({"model": str(TOKENIZER), "max_body_memory": 1024}).config)
    async with bodies.read(short(), "1000", "a") as body:
        assert body == b"{}"
        for key_name, size in (("", "25"), ("b", "25"), ("a", "2"), ("", None)):
            with pytest.raises(RateLimitError, match="--max-body-memory"):
                async with bodies.read(short(), size, key_name):
                    pass
        async with bodies.read(short(), "2", "b"):
            pass
    async with bodies.read(short(), None, "a") as body:
        assert body == b"{}"


def test_an_application_without_keys_is_open() -> None:
    keys = IngressKeys(read_arguments({"model": str(TOKENIZER)}).config)
    assert keys.check({}) is None
    assert keys.check({"Authorization": "Bearer any"}) is None
