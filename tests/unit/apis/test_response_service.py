"""Responses that are made in the background, and those that another API process keeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jaxserve.apis.responses.service import ResponseService
from jaxserve.apis.responses.store import KeptResponse, StoredResponse, encode_stored
from jaxserve.config import ResponsesConfig
from jaxserve.errors import ConfigError, UnavailableError
from jaxserve.frontend.peers import PeerProcesses
from jaxserve.metrics import Metrics
from jaxserve.tokenizer.tokenizer import Tokenizer
from tests.unit.apis.test_replies import EOS, ids, play
from tests.unit.apis.test_response_store import stored
from tests.unit.http.test_http_tenants import until_reserved
from tests.unit.running_api import Api, running_api

PATH = "/v1/responses"
BODY: dict[str, Any] = {"input": "Hi", "background": True}


async def ask(api: Api, method: str, path: str) -> tuple[int, Any]:
    async with api.http.request(method, f"{PATH}/{path}") as response:
        return response.status, await response.json()


async def ended(api: Api, response_id: str) -> Any:
    """The response once nothing of it is under way."""
    await asyncio.wait_for(api.client.admission.wait_idle(), 60)
    return (await ask(api, "GET", response_id))[1]


async def test_a_background_response_is_there_when_it_is_done(api: Api) -> None:
    status, begun = await api.post(PATH, BODY)
    assert (status, begun["status"], begun["background"], begun["output"]) == (200, "in_progress", True, [])
    assert (await ask(api, "GET", begun["id"]))[1] == begun
    assert api.client.admission.num_sequences == 1
    await play(api, [ids(api, "Hey"), [EOS]], finish_reason="stop")
    response = await ended(api, begun["id"])
    assert (response["status"], response["output"][0]["content"][0]["text"]) == ("completed", "Hey")
    assert response["usage"]["output_tokens"] == 4
    status, reply = await ask(api, "POST", f"{begun['id']}/cancel")
    assert (status, reply["error"]["message"]) == (400, "Cannot cancel a response that is completed.")


async def test_a_background_response_that_is_cancelled_stops_in_the_engine(api: Api) -> None:
    _, begun = await api.post(PATH, BODY)
    request = await play(api, [ids(api, "He")], finish_reason=None)
    await api.engine.is_heard()
    for _ in range(2):
        status, response = await ask(api, "POST", f"{begun['id']}/cancel")
        assert (status, response["status"]) == (200, "cancelled")
    assert await api.engine.was_aborted() == request.request_id
    assert api.client.admission.num_sequences == 0
    assert (await ask(api, "GET", begun["id"]))[1] == response
    (message,) = response["output"]
    assert (message["status"], message["content"][0]["text"]) == ("incomplete", "He")


async def test_a_background_response_that_fails_says_why(api: Api) -> None:
    _, begun = await api.post(PATH, BODY)
    api.engine.refuse(await api.engine.added(), "RateLimitError", "too many")
    response = await ended(api, begun["id"])
    assert (response["status"], response["error"]["code"]) == ("failed", "rate_limit_exceeded")


async def test_a_background_response_that_is_deleted_is_stopped_and_stays_deleted(api: Api) -> None:
    _, begun = await api.post(PATH, BODY)
    request = await api.engine.added()
    assert await ask(api, "DELETE", begun["id"]) == (200, {"id": begun["id"], "object": "response", "deleted": True})
    assert await api.engine.was_aborted() == request.request_id
    assert (await ask(api, "GET", begun["id"]))[0] == 404


async def test_a_response_in_progress_cannot_be_continued(api: Api) -> None:
    _, begun = await api.post(PATH, BODY)
    status, reply = await api.post(PATH, {"input": "Go on", "previous_response_id": begun["id"]})
    assert (status, reply["error"]["param"]) == (400, "previous_response_id")
    await ask(api, "DELETE", begun["id"])


async def test_the_responses_that_a_request_continues_count_among_bodies_before_they_are_decoded(
    tokenizer: Tokenizer,
) -> None:
    async with running_api(tokenizer, max_body_memory=5000) as api:
        earlier = stored(api.responses.new_id(), "x" * 3000, status="completed")
        later = stored(api.responses.new_id(), status="completed", previous_response_id=earlier.response.id)
        for one in (earlier, later):
            api.responses.store.put(one)
        body = {"input": "Hi", "previous_response_id": later.response.id}
        _, writer = await asyncio.open_connection("127.0.0.1", api.port)
        head = "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1500\r\n\r\n{"
        writer.write(head.encode())
        await until_reserved(api, 1500)
        status, reply = await api.post(PATH, body)
        assert status == 429 and "(--max-body-memory)" in reply["error"]["message"]
        writer.close()
        await until_reserved(api, 0)
        status, reply = await api.post(PATH, body)
        assert (status, reply["error"]["code"]) == (400, "context_length_exceeded"), "it was read"
        assert api.bodies.num_bytes == 0


@pytest.mark.parametrize("fields", [{"stream": True}, {"store": False}])
async def test_background_is_refused_where_no_client_could_ask_for_it(api: Api, fields: dict[str, Any]) -> None:
    status, reply = await api.post(PATH, BODY | fields)
    assert (status, reply["error"]["param"]) == (400, "background")


async def test_a_response_that_was_not_made_in_the_background_cannot_be_cancelled(api: Api) -> None:
    (_, response), _ = await asyncio.gather(api.post(PATH, {"input": "Hi"}), play(api, [[EOS]], finish_reason="stop"))
    status, reply = await ask(api, "POST", f"{response['id']}/cancel")
    assert (status, reply["error"]["message"]) == (400, "Cannot cancel a synchronous response.")


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[list[ResponseService]]:
    """The services of two API processes."""
    peers = [PeerProcesses(index, 2, tmp_path) for index in range(2)]
    made = [ResponseService(ResponsesConfig(max_stored_responses=6), one) for one in peers]
    metrics = Metrics("m")
    async with peers[0].answering(metrics, made[0].answers), peers[1].answering(metrics, made[1].answers):
        yield made


def kept_form(response: StoredResponse) -> KeptResponse:
    return msgspec.msgpack.decode(encode_stored(response), type=KeptResponse)


async def test_each_process_finds_and_deletes_the_responses_of_the_other(services: list[ResponseService]) -> None:
    kept = stored(services[1].new_id())
    response_id = kept.response.id
    services[1].store.put(kept)
    assert await services[0].get(response_id) == await services[1].get(response_id) == kept_form(kept)
    sizes: list[int] = []
    assert await services[0].get(response_id, sizes.append) == kept_form(kept)
    assert sizes == [services[1].store.num_bytes]
    assert await services[0].delete(response_id) == kept_form(kept)
    assert await services[0].get(response_id) is None
    assert len(services[1].store) == 0


async def test_a_run_is_cancelled_where_it_is(services: list[ResponseService]) -> None:
    kept = stored(services[1].new_id())
    services[1].store.put(kept)
    ends: list[bool] = []
    services[1].run(kept.response.id, asyncio.sleep(60), ends.append)
    assert await services[0].cancel(kept.response.id) == kept_form(kept)
    assert ends == [True]


async def test_the_end_of_a_service_ends_its_runs(services: list[ResponseService]) -> None:
    ends: asyncio.Queue[bool] = asyncio.Queue()
    services[0].run("a", asyncio.sleep(60), ends.put_nowait)
    services[0].run("b", asyncio.sleep(0), ends.put_nowait)
    assert await asyncio.wait_for(ends.get(), 60) is False
    await services[0].aclose()
    assert ends.get_nowait() is True


@pytest.mark.parametrize("response_id", ["", "resp_x", "resp_00g" + "0" * 32, "resp_002" + "0" * 32, "../x"])
async def test_an_id_that_no_process_gave_has_no_response(services: list[ResponseService], response_id: str) -> None:
    assert await services[0].get(response_id) is None


async def test_a_process_that_is_gone_is_unavailable(tmp_path: Path) -> None:
    service = ResponseService(ResponsesConfig(), PeerProcesses(0, 2, tmp_path))
    with pytest.raises(UnavailableError):
        await service.get("resp_001" + "0" * 32)


def test_the_room_of_a_server_is_divided() -> None:
    service = ResponseService(ResponsesConfig(max_stored_responses=6), PeerProcesses(0, 2, Path()))
    for number in range(5):
        service.store.put(stored(str(number)))
    assert len(service.store) == 3


async def test_ids_end_with_the_servers_suffix_and_those_of_another_server_are_unknown() -> None:
    here, elsewhere = (
        ResponseService(ResponsesConfig(response_id_suffix=suffix), PeerProcesses(0, 1, Path()))
        for suffix in ("a1", "b2")
    )
    response = stored(here.new_id())
    for service in (here, elsewhere):
        service.store.put(response)
    assert response.response.id.endswith("a1")
    assert await here.get(response.response.id) == kept_form(response)
    assert await elsewhere.get(response.response.id) is None


@pytest.mark.parametrize("suffix", ["A", "a b", "-", "a" * 33])
def test_a_suffix_that_ids_cannot_have_is_refused(suffix: str) -> None:
    with pytest.raises(ConfigError, match=r"--response-id-suffix .*: expected up to 32 lower-case letters and digits"):
        ResponsesConfig(response_id_suffix=suffix)
