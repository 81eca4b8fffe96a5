"""A key, the operator and a web page may do different things over HTTP."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from jaxserve.tenants import KeyRecord
from jaxserve.tokenizer.tokenizer import Tokenizer
from tests.unit.running_api import Api, running_api

TEAM = KeyRecord(key="a", name="team", max_concurrent_requests=1, tokens_per_minute=9)
OPERATOR = KeyRecord(key="o", name="operator", is_operator=True)
AS_TEAM, AS_OPERATOR = ({"Authorization": f"Bearer {key}"} for key in "ao")
BODY = {"prompt": [5, 6], "max_tokens": 9}


async def until_reserved(api: Api, num_bytes: int) -> None:
    for _ in range(100_000):
        if api.bodies.num_bytes == num_bytes:
            return
        await asyncio.sleep(0)
    raise AssertionError(f"{api.bodies.num_bytes} bytes are reserved")


async def test_a_key_has_its_limits_its_salt_and_its_counters(tokenizer: Tokenizer) -> None:
    async with running_api(tokenizer, records=[TEAM, OPERATOR]) as api:
        first = asyncio.create_task(api.post("/v1/completions", BODY | {"cache_salt": "x"}, headers=AS_TEAM))
        request = await api.engine.added()
        salt = str(request.cache_salt)
        assert salt.startswith("team\n") and salt.endswith("\nx")
        assert request.key_name == "team"
        status, body = await api.post("/v1/completions", BODY, headers=AS_TEAM)
        assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
        async with api.http.get("/v1/models") as response:
            assert response.status == 401
        api.engine.output(request, [5] * 9, finish_reason="length")
        assert (await first)[0] == 200
        async with api.http.post("/v1/completions", json=BODY, headers=AS_TEAM) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "20")
        other = asyncio.create_task(api.post("/v1/completions", BODY, headers=AS_OPERATOR))
        api.engine.output(await api.engine.added(), [5], finish_reason="length")
        assert (await other)[0] == 200, "a key's limits are its own"
        status, body = await api.post("/v1/completions", BODY | {"priority": -1}, headers=AS_OPERATOR)
        assert (status, body["error"]["param"]) == (400, "priority")
        assert api.metrics.value("key_generation_tokens", key="team") == 9
        assert api.metrics.value("key_rejections", key="team", reason="tokens") == 1


async def test_a_request_without_a_priority_gets_the_most_urgent_one_of_a_key_that_may_not_have_0(
    tokenizer: Tokenizer,
) -> None:
    async with running_api(tokenizer, records=[KeyRecord(key="a", name="team", highest_priority=5)]) as api:
        for given, expected in ((None, 5), (6, 6)):
            reply = asyncio.create_task(api.post("/v1/completions", BODY | {"priority": given}, headers=AS_TEAM))
            request = await api.engine.added()
            assert request.priority == expected
            api.engine.output(request, [5], finish_reason="length")
            assert (await reply)[0] == 200
        status, body = await api.post("/v1/completions", BODY | {"priority": 0}, headers=AS_TEAM)
        assert (status, body["error"]["param"]) == (400, "priority")


async def test_a_background_response_counts_among_the_requests_of_its_key_until_its_end(tokenizer: Tokenizer) -> None:
    record = KeyRecord(key="a", name="team", max_concurrent_requests=1)
    async with running_api(tokenizer, records=[record]) as api:
        body = {"input": "x", "background": True, "max_output_tokens": 9}
        started = asyncio.create_task(api.post("/v1/responses", body, headers=AS_TEAM))
        request = await api.engine.added()
        assert (await started)[0] == 200
        assert (await api.post("/tokenize", {"prompt": "x"}, headers=AS_TEAM))[0] == 429
        async with api.http.get("/metrics", headers=AS_TEAM) as response:
            assert response.status == 200, "operation is not limited"
        api.engine.output(request, [5], finish_reason="length")
        statuses = {(await api.post("/tokenize", {"prompt": "x"}, headers=AS_TEAM))[0] for _ in range(100)}
        assert 200 in statuses, "its place came back"


async def test_commands_are_for_the_operator(tokenizer: Tokenizer) -> None:
    async with running_api(tokenizer, records=[TEAM, OPERATOR], allows_commands=False) as api:
        for path in ("/reset_prefix_cache", "/start_profile", "/stop_profile"):
            status, body = await api.post(path, headers=AS_TEAM)
            assert (status, body["error"]["code"]) == (403, "operator_only")
        command = asyncio.create_task(api.post("/start_profile", headers=AS_OPERATOR))
        await api.engine.is_heard()
        assert not command.done(), "the engine has it"
        command.cancel()


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://evil.example:8000", 403),
        ("null", 403),
        ("http://127.0.0.1.evil.example", 403),
        ("http://localhost:8000", 200),
        ("http://127.0.0.1:8000", 200),
        ("https://chat.example.org", 200),
        (None, 200),
    ],
)
async def test_pages_of_other_hosts_write_nothing_to_a_local_server(
    tokenizer: Tokenizer, origin: str | None, status: int
) -> None:
    async with running_api(tokenizer, is_local=True, cors_allowed_origins="https://chat.example.org") as api:
        headers = {} if origin is None else {"Origin": origin}
        assert (await api.post("/tokenize", {"prompt": "x"}, headers=headers))[0] == status


async def test_a_name_of_another_host_reads_only_what_needs_no_key(tokenizer: Tokenizer) -> None:
    async with running_api(tokenizer, is_local=True, has_page=True) as api:
        for host, status in (("evil.example", 403), ("localhost:8000", 200), ("[::1]", 200)):
            for path in ("/metrics", "/v1/models", "/ui/state", "/docs", "/startup"):
                async with api.http.get(path, headers={"Host": host}) as response:
                    assert response.status == status, path
            for path in ("/live", "/health", "/ready", "/version", "/"):
                async with api.http.get(path, headers={"Host": host}) as response:
                    assert response.status == 200, path


async def test_bodies_share_a_budget(tokenizer: Tokenizer) -> None:
    async with running_api(tokenizer, max_body_memory=100) as api:
        _, writer = await asyncio.open_connection("127.0.0.1", api.port)
        head = "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 90\r\n\r\n{"
        writer.write(head.encode())
        await until_reserved(api, 90)
        status, body = await api.post("/tokenize", {"prompt": "x"})
        assert status == 429 and "(--max-body-memory)" in body["error"]["message"]
        writer.close()
        await until_reserved(api, 0)
        assert (await api.post("/tokenize", {"prompt": "x" * 200}))[0] == 200, "one body alone is never too large"


async def test_a_key_leaves_a_quarter_of_the_memory_of_bodies_to_other_keys(tokenizer: Tokenizer) -> None:
    async with contextlib.AsyncExitStack() as stack:
        api = await stack.enter_async_context(
            running_api(tokenizer, records=[KeyRecord(key="a", name="team"), OPERATOR], max_body_memory=1000)
        )

        async def upload(key: str, num_bytes: int) -> None:
            _, writer = await asyncio.open_connection("127.0.0.1", api.port)
            stack.callback(writer.close)
            head = f"POST /tokenize HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {num_bytes}\r\n\r\n{{".encode())

        await upload("a", 750)
        await until_reserved(api, 750)
        status, body = await api.post("/tokenize", {"prompt": "x"}, headers=AS_TEAM)
        assert status == 429 and "at most 750 may" in body["error"]["message"]
        await upload("o", 200)
        await until_reserved(api, 950)
        assert (await api.post("/tokenize", {"prompt": "x"}, headers=AS_OPERATOR))[0] == 200


async def test_one_request_of_a_key_may_take_more_than_its_share_of_bodies(tokenizer: Tokenizer) -> None:
    async with running_api(tokenizer, records=[KeyRecord(key="a", name="team"), OPERATOR], max_body_memory=100) as api:
        assert (await api.post("/tokenize", {"prompt": "x" * 70}, headers=AS_TEAM))[0] == 200


async def test_engine_requests_carry_the_clients_id_and_failed_streams_are_not_counted_as_200(
    tokenizer: Tokenizer,
) -> None:
    async with running_api(tokenizer, keep_alive_s=0.02) as api:
        headers = {"X-Request-Id": "abc-123"}
        reply = asyncio.create_task(api.post("/v1/completions", BODY, headers=headers))
        request = await api.engine.added()
        assert request.request_id.startswith("abc-123:")
        api.engine.output(request, [5], finish_reason="length")
        assert (await reply)[0] == 200
        async with api.http.post("/v1/completions", json=BODY | {"stream": True}) as response:
            request = await api.engine.added()
            api.engine.output(request, [5])
            await response.content.readany()
            api.engine.refuse(request, "InternalError", "bad luck")
            assert b"bad luck" in await response.read()
        assert api.metrics.value("http_requests", route="/v1/completions", status="500") == 1
        assert api.metrics.value("http_requests", route="/v1/completions", status="200") == 1
        assert api.metrics.value("http_request_duration_seconds") == 2


async def test_a_key_leaves_a_quarter_of_the_places_to_other_keys(tokenizer: Tokenizer) -> None:
    flood = KeyRecord(key="a", name="team")
    async with running_api(tokenizer, records=[flood, OPERATOR]) as api:
        admission = api.client.admission
        admission.has_several_keys = True
        places = admission.max_sequences
        share = places - places // 4
        waiting = []
        for _ in range(share):
            waiting.append(asyncio.create_task(api.post("/v1/completions", BODY, headers=AS_TEAM)))
            await api.engine.added()
        status, body = await api.post("/v1/completions", BODY, headers=AS_TEAM)
        assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
        assert f"at most {share} may" in body["error"]["message"]
        other = asyncio.create_task(api.post("/v1/completions", BODY, headers=AS_OPERATOR))
        api.engine.output(await api.engine.added(), [5], finish_reason="length")
        assert (await other)[0] == 200
        assert api.metrics.value("admission_rejections", reason="key_share") == 1
        for task in waiting:
            task.cancel()
