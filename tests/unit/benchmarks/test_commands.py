"""Command lines of servers and of the load generator."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.peers.__main__ import make_parser, make_peers
from benchmarks.peers.jaxserve_server import Jaxserve
from benchmarks.peers.load import Cell, load_command, make_cells, seed_of
from benchmarks.peers.peer import Entrant, Launch, Peer, parse_entrant
from benchmarks.peers.weights import Weights


@pytest.fixture
def peers(tmp_path: Path) -> Mapping[str, Peer]:
    return make_peers(tmp_path)


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Weights:
    monkeypatch.setattr("benchmarks.peers.weights.source_format", lambda source: "q4_1")
    return Weights(tmp_path / "model.Q4_1.gguf", tmp_path / "copies")


def launch(peers: Mapping[str, Peer], weights: Weights, text: str) -> Launch:
    entrant = parse_entrant(text, peers)
    return entrant.peer.launch(weights, entrant.format_name, port=1234, cpus=(0, 3))


def value_after(command: tuple[str, ...] | list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_default_peers_and_workloads_can_be_run(peers: Mapping[str, Peer]) -> None:
    arguments = make_parser().parse_args([])
    entrants = [parse_entrant(text, peers) for text in arguments.peers]
    assert [each.label for each in entrants] == ["llama-server:f32", "vllm:f32", "transformers:f32"]
    assert len(make_cells(arguments.workloads, arguments.concurrency, arguments.num_prompts)) == 6


def test_a_peer_without_a_format_runs_in_float32(peers: Mapping[str, Peer]) -> None:
    assert all(parse_entrant(name, peers).format_name == "f32" for name in peers)


@pytest.mark.parametrize(
    ("text", "message"),
    [("llama", "choose from llama-server, vllm, transformers"), ("vllm:q8_0", "vllm runs f32, f32-eager")],
)
def test_an_unknown_peer_or_format_names_what_there_is(peers: Mapping[str, Peer], text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_entrant(text, peers)


def test_llama_server_gets_a_slot_per_stream_and_a_thread_per_core(peers: Mapping[str, Peer], weights: Weights) -> None:
    command = launch(peers, weights, "llama-server:f16").command
    assert value_after(command, "-m") == str(weights.folder / "model.f16.gguf")
    assert (value_after(command, "-t"), value_after(command, "-np"), value_after(command, "-c")) == (
        "2",
        "32",
        "262144",
    )


def test_llama_server_reads_the_source_in_its_own_format(peers: Mapping[str, Peer], weights: Weights) -> None:
    assert value_after(launch(peers, weights, "llama-server:q4_1").command, "-m") == str(weights.source)


def test_vllm_binds_a_thread_to_each_core_and_stays_off_the_network(
    peers: Mapping[str, Peer], weights: Weights
) -> None:
    found = launch(peers, weights, "vllm:f32")
    assert found.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0,3"
    assert found.environment["HF_HUB_OFFLINE"] == "1"
    assert "--enforce-eager" not in found.command
    assert "--enforce-eager" in launch(peers, weights, "vllm:f32-eager").command


def test_transformers_is_asked_without_the_fields_it_refuses(peers: Mapping[str, Peer], weights: Weights) -> None:
    body = launch(peers, weights, "transformers:f32").extra_body
    assert body["ignore_eos"] is None
    assert json.loads(body["generation_config"]) == {"eos_token_id": -1}


def test_words_of_the_user_come_last_and_win(weights: Weights) -> None:
    jaxserve = Entrant(Jaxserve(["--kv-cache-memory", "1GiB"]), "f32")
    command = jaxserve.peer.launch(weights, "f32", port=1234, cpus=(0, 1)).command
    assert command[-2:] == ("--kv-cache-memory", "1GiB")
    assert jaxserve.label == "jaxserve"


def test_load_is_counted_by_one_tokenizer_for_all_servers(tmp_path: Path) -> None:
    plain = Launch(command=("server",))
    strict = Launch(command=("server",), model="name", extra_body={"ignore_eos": None})
    commands = [
        load_command(
            each,
            "http://127.0.0.1:1",
            Cell("chat", 4, 16),
            seed=7,
            tokenizer=tmp_path / "m.gguf",
            json_file=tmp_path / "f",
        )
        for each in (plain, strict)
    ]
    for command in commands:
        assert value_after(command, "--tokenizer") == str(tmp_path / "m.gguf")
        assert (value_after(command, "--max-concurrency"), value_after(command, "--num-prompts")) == ("4", "16")
    assert "--extra-body" not in commands[0]
    assert json.loads(value_after(commands[1], "--extra-body")) == {"ignore_eos": None}


def test_load_command_is_one_that_the_load_generator_takes(tmp_path: Path) -> None:
    import argparse

    from jaxserve.cli.bench import add_arguments

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    strict = Launch(command=("server",), extra_body={"ignore_eos": None})
    command = load_command(
        strict, "http://127.0.0.1:1", Cell("prefix", 16, 32), seed=1, tokenizer=tmp_path, json_file=tmp_path / "f"
    )
    assert parser.parse_args(command[command.index("bench") + 1 :]).workload == "prefix"


def test_every_round_and_concurrency_has_prompts_of_its_own() -> None:
    cells = make_cells(["chat"], None, None)
    seeds = [seed_of(5, number, cell) for number in range(3) for cell in cells]
    assert len(set(seeds)) == len(seeds) == 12


def test_cells_hold_more_requests_than_streams() -> None:
    chat = make_cells(["chat"], None, None)
    assert [(cell.concurrency, cell.num_prompts) for cell in chat] == [(1, 10), (4, 16), (16, 40), (32, 72)]
    assert make_cells(["prefill"], [2], 3) == [Cell("prefill", 2, 3)]


@pytest.mark.parametrize("words", ["--no-overlap", "--quantization int8"])
def test_words_for_jaxserve_may_begin_with_dashes(words: str) -> None:
    assert make_parser().parse_args([f"--jaxserve-args={words}"]).jaxserve_args == words
