"""Commands to the engine, for operators: profiles and cache resets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.checkpoint.safetensors_file import write_safetensors
from jaxserve.flight.record import read_record
from jaxserve.flight.replay import replay
from tests.e2e.http_server import TOKENIZER, Server, running

FAKE = {"vocab_size": 384, "eos_token_ids": []}
PROMPT = {"prompt": list(range(5, 45)), "max_tokens": 4}


def post(server: Server, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    status, _, reply = server.request("POST", path, body)
    return status, json.loads(reply)


def test_prefixes_are_forgotten() -> None:
    with running(FAKE) as server:
        cached = []
        for _ in range(2):
            for _ in range(2):
                _, reply = post(server, "/v1/completions", PROMPT)
                cached.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
            assert post(server, "/reset_prefix_cache") == (200, {"status": "done"})
        assert cached[0] == cached[2] == 0
        assert cached[1] == cached[3] > 0


def test_flight_records_are_written_while_requests_are_served(tmp_path: Path) -> None:
    with running(FAKE, recorder={"flight_recorder_dir": str(tmp_path)}) as server:
        assert post(server, "/v1/completions", PROMPT)[0] == 200
        status, reply = post(server, "/dump_flight_record")
        assert (status, reply["status"]) == (200, "done")
        record = read_record(Path(reply["files"][0]))
        assert record.num_steps == PROMPT["max_tokens"]
        assert replay(record) is None


def test_a_profile_is_written_while_requests_are_served(tmp_path: Path) -> None:
    with running(FAKE, server={"profile_dir": str(tmp_path)}) as server:
        status, reply = post(server, "/stop_profile")
        assert (status, reply["error"]["message"]) == (400, "No profile is being taken: /start_profile begins one.")
        assert post(server, "/start_profile") == (200, {"status": "done"})
        status, reply = post(server, "/start_profile")
        assert (status, reply["error"]["message"]) == (400, "A profile is being taken already: /stop_profile ends it.")
        assert post(server, "/v1/completions", PROMPT)[0] == 200
        assert not list(tmp_path.rglob("*.xplane.pb"))
        assert post(server, "/stop_profile") == (200, {"status": "done"})
        assert len(list(tmp_path.rglob("*.xplane.pb"))) == 1
        assert post(server, "/v1/completions", PROMPT)[0] == 200


def test_without_a_folder_no_profile_can_be_taken() -> None:
    with running(FAKE, server={"api_key": "secret", "public_commands": True}) as server:
        assert post(server, "/start_profile")[0] == 401
        server.api_key = "secret"
        status, reply = post(server, "/start_profile")
        assert status == 400
        assert "without --profile-dir" in reply["error"]["message"]


def test_weights_are_updated_and_replies_name_their_version(tmp_path: Path) -> None:
    with running(FAKE, server={"allow_weight_updates": True}) as server:
        body = PROMPT | {"return_metrics": True}
        status, headers, reply = server.request("POST", "/v1/completions", body)
        assert (headers["x-weight-version"], json.loads(reply)["metrics"]["weight_version"]) == ("0", 0)
        assert post(server, "/update_weights", {"model": "other"}) == (200, {"status": "done", "weight_version": 1})
        status, headers, reply = server.request("POST", "/v1/completions", body)
        metrics = json.loads(reply)["metrics"]
        assert (headers["x-weight-version"], metrics["weight_version"]) == ("1", 1)
        assert metrics["weight_version_tokens"] == {"1": 4}
        status, headers, _ = server.request("POST", "/v1/completions", PROMPT | {"stream": True})
        assert headers["x-weight-version"] == "1"
        for body, text in (
            ({}, "'model': is needed, or `tensors` instead"),
            ({"model": "other", "tensors": "other"}, "'tensors': must not be given beside `model`"),
        ):
            status, refused = post(server, "/update_weights", body)
            assert (status, text in refused["error"]["message"]) == (400, True)
        path = tmp_path / "step.safetensors"
        write_safetensors(path, {"a": np.zeros(3, np.float32)})
        assert post(server, "/update_weights", {"tensors": str(path)})[1]["weight_version"] == 2
        status, refused = post(server, "/update_weights", {"model": "/nowhere"})
        assert (status, refused["error"]["message"]) == (400, "/nowhere: no such folder")


def test_vectors_and_scores_name_the_version_of_their_weights() -> None:
    model = {"model": str(TOKENIZER), "task": "embed", "max_model_len": 32}
    requests = {
        "/v1/embeddings": {"input": ["a", "b c"]},
        "/v1/score": {"text_1": "a", "text_2": ["b", "c"]},
        "/v1/rerank": {"query": "a", "documents": ["b", "c"]},
    }
    with running({"embedding_size": 16}, model=model, server={"allow_weight_updates": True}) as server:
        for version in range(2):
            for path, body in requests.items():
                status, headers, _ = server.request("POST", path, body)
                assert (status, headers["x-weight-version"]) == (200, str(version))
            if version == 0:
                assert post(server, "/update_weights", {"model": "other"})[0] == 200


def test_a_pause_and_a_sleep_are_reported_and_end() -> None:
    def get(path: str) -> Any:
        return json.loads(server.request("GET", path)[2])

    with running(FAKE, server={"allow_weight_updates": True}) as server:
        assert post(server, "/pause?mode=keep")[0] == 200
        assert (get("/is_paused"), get("/is_sleeping")) == ({"is_paused": True}, {"is_sleeping": False})
        assert post(server, "/resume")[0] == 200
        assert post(server, "/sleep?level=3")[0] == 400
        assert post(server, "/sleep?level=2")[0] == 200
        assert get("/is_sleeping") == {"is_sleeping": True}
        status, headers, _ = server.request("POST", "/v1/completions", PROMPT)
        assert (status, "retry-after" in headers) == (503, True)
        assert post(server, "/wake_up")[0] == 200
        assert post(server, "/v1/completions", PROMPT)[0] == 200


def names(server: Server) -> list[str]:
    return [card["id"] for card in json.loads(server.request("GET", "/v1/models")[2])["data"]]


def test_adapters_are_loaded_by_name() -> None:
    with running(
        FAKE, server={"allow_weight_updates": True}, model={"model": str(TOKENIZER), "max_loras": 1}
    ) as server:
        [base] = names(server)
        body = {"lora_name": "sql", "lora_path": "acme/sql"}
        assert post(server, "/v1/completions", PROMPT | {"model": "sql"})[0] == 404
        assert post(server, "/v1/load_lora_adapter", body)[0] == 200
        assert names(server) == [base, "sql"]
        assert post(server, "/v1/completions", PROMPT | {"model": "sql"})[1]["model"] == "sql"
        status, reply = post(server, "/v1/load_lora_adapter", body | {"lora_name": "other"})
        assert (status, "--max-loras" in reply["error"]["message"]) == (400, True)
        assert post(server, "/v1/load_lora_adapter", body | {"lora_name": base})[0] == 400
        assert post(server, "/v1/unload_lora_adapter", {"lora_name": "other"})[0] == 404
        assert post(server, "/v1/unload_lora_adapter", {"lora_name": "sql"})[0] == 200
        assert post(server, "/v1/completions", PROMPT | {"model": "sql"})[0] == 404


def test_commands_that_change_the_model_must_be_allowed() -> None:
    with running(FAKE) as server:
        for path in ("/pause", "/resume", "/sleep", "/wake_up"):
            status, reply = post(server, path)
            assert (status, reply["error"]["code"]) == (400, "command_disabled")
        assert post(server, "/update_weights", {"model": "other"})[0] == 400
