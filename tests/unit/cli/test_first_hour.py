"""The commands of the first hour: config, check, status and doctor."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.cli.main import main
from jaxserve.cli.status import describe_health, status_lines
from jaxserve.errors import ConfigError
from jaxserve.runner import program_cache
from jaxserve.runner.program_cache import ProgramCache
from jaxserve.runtime.environment import load_config
from jaxserve.runtime.settings import describe_changes
from jaxserve.tools import doctor
from jaxserve.tools.config_check import file_mistakes
from jaxserve.tools.found_devices import FoundDevices, NoDeviceError, find_devices
from tests.models.mmproj_files import write_pair
from tests.unit.checkpoint.checkpoint_files import write_decoder
from tests.unit.tools.planning.configs import SMOLLM2, write_config

ROOT = Path(__file__).parents[3]


def test_config_prints_what_would_be_in_force(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "m", "--api-key", "secret", "--kv-cache-memory", "1GiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "model:" in lines
    assert {"  model: m", "  api_key: ***", "  kv_cache_memory: 1GiB", "  port: 8000"} <= set(lines)
    assert main(["config", "m", "--changed"]) == 0
    assert "port" not in capsys.readouterr().out


def test_the_line_of_a_start_has_only_what_was_changed() -> None:
    config = load_config(flags={"model": "m", "max_num_seqs": "3", "api_key": "secret"})
    assert describe_changes(config) == "model=m max_num_seqs=3 api_key=***"


@pytest.mark.parametrize(
    ("text", "mistakes"),
    [
        ("model: m\nscheduler:\n  max_num_seqs: 4\n", []),
        (f"model: m\nmax_body_size: {'1' * 309}.5GiB\n", ["2: max_body_size"]),
        ("# nothing\n", []),
        (
            "model: m\nscheduler:\n  max_num_seq: 4\nport: high\n",
            [
                "3: max_num_seq: unknown key; did you mean `max_num_seqs`?",
                "4: port 'high': expected an integer, at least 0 and at most 65535",
            ],
        ),
        ("cache:\n  port: 1\n", ["2: port: unknown key; it belongs to `server`"]),
        ("port: 1\nserver:\n  port: 2\n", ["3: port: given twice, first in line 1"]),
        ("- a\n", ["1: expected `key: value` lines"]),
        ("a: [\n", ["2: not YAML"]),
        ("models:\n  chat: org/model\n  vectors:\n    model: {model: m, task: embed}\n    max_num_seqs: 3\n", []),
        (
            "model: m\nmodels:\n  chat: [3]\n  vectors:\n    task: embd\n    port: 1\napi_processes: 2\n",
            [
                "1: model: not beside `models`, which names every model",
                "3: models.chat ['3']: expected `NAME: MODEL`, `NAME: FILE.yaml`, or `NAME:` with",
                "4: models.vectors.model: missing: GGUF file",
                "5: models.vectors.task 'embd': expected one of auto, generate, embed",
                "6: models.vectors.port: a setting of the server, not of one of its models",
                "7: api_processes: not with several models",
            ],
        ),
        ("models:\n  a: &a {model: m, max_num_seqs: 3}\n  b:\n    <<: *a\n    model: n\n", []),
        ("models:\n  a: x\n  b: {<<: 3, model: n}\n", ["3: models.b.<<: unknown key"]),
        ("models:\n  a: x\n  a: y\n", ["3: models.a: given twice, first in line 2"]),
        ("models: x\n", ["1: models: expected lines of `NAME: MODEL`"]),
        ("models: {a: x}\nmodels: {b: y}\n", ["2: models: given twice, first in line 1"]),
        ("models:\n  'a,b': x\n", ["2: models: the name of a model, without `,`"]),
        ("model: m\nmodel_s: {}\n", ["2: model_s: unknown key; did you mean `models`?"]),
        ("scheduler: 3\n", ["1: scheduler: a section's settings stand below it, indented"]),
    ],
)
def test_check_names_line_key_and_suggestion(tmp_path: Path, text: str, mistakes: list[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    found = file_mistakes(file)
    assert len(found) == len(mistakes), found
    assert all(one.startswith(f"{file}:{expected}") for one, expected in zip(found, mistakes, strict=True)), found


@pytest.mark.parametrize("text", ["{[a]: 1}", "port: 1\n? {a: b}\n: 2\n"])
def test_check_names_keys_that_are_no_texts(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    (only,) = file_mistakes(file)
    assert "expected a key that is a text, found a " in only


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("lora_modules: foo", "--lora-modules 'foo': expected NAME=PATH"),
        ("max_lora_rank: 8", "--max-lora-rank 8: needs --max-loras"),
        ("lora_modules: 'a=x,b=y'\nmax_loras: 1", "--max-loras 1: --lora-modules has 2 adapters"),
        ("limit_mm_per_prompt: banana", "--limit-mm-per-prompt 'banana': expected image=N"),
        ("limit_mm_per_prompt: '{\"image\": Infinity}'", "--limit-mm-per-prompt"),
        ("kv_listen: nonsense\nkv_offload_memory: 1GiB", "--kv-listen 'nonsense': expected HOST:PORT"),
        ("kv_listen: 127.0.0.1:7000", "--kv-listen needs --kv-offload-memory"),
        (
            "kv_listen: '10.0.0.1:65535'\nkv_offload_memory: 1\nreplicas: 2",
            "--kv-listen '10.0.0.1:65536': expected HOST:PORT",
        ),
        ("kv_peers: 'a:1, host'", "--kv-peers 'host': expected HOST:PORT"),
        (
            "speculative_method: mtp\nspeculative_model: d\nnum_speculative_tokens: 1",
            "--speculative-method mtp: not with --speculative-model d",
        ),
        ("speculative_method: mtp", "--speculative-method mtp: set --num-speculative-tokens"),
        ("speculative_model: d", "--speculative-model d: set --num-speculative-tokens"),
        ("task: generate\npooling: mean", "--pooling mean: needs --task embed"),
        ("task: embed\nkv_offload_memory: 1", "--kv-offload-memory: an engine that embeds keeps no KV pages"),
        ("attention_backend: reference\ncpu_kernels: native", "--cpu-kernels native and --attention-backend reference"),
        ("tensor_parallel_size: 2\ncpu_kernels: native", "--cpu-kernels native: only on one CPU device, not on 2"),
        (
            "speculative_model: d\nnum_speculative_tokens: 1\ndeterministic: true",
            "--speculative-model d: not with --deterministic",
        ),
    ],
)
def test_check_finds_settings_that_no_server_starts_with(tmp_path: Path, text: str, mistake: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"model: m\n{text}\n")
    (only,) = file_mistakes(file)
    assert only.startswith(mistake)


def test_check_looks_into_the_files_of_models(tmp_path: Path) -> None:
    file, own = tmp_path / "server.yaml", tmp_path / "own.yaml"
    file.write_text(f"models:\n  chat: m\n  vectors: {own}\n")
    assert file_mistakes(file) == [f"{file}:3: models.vectors: {own}: No such file or directory"]
    own.write_text("task: embed\nport: 1\n")
    assert [one.removeprefix(f"{file}:3: models.vectors: {own}:") for one in file_mistakes(file)] == [
        "1: model: missing: GGUF file, Hugging Face directory, hub id (`owner/name`), or `default`",
        "2: port: a setting of the server, not of one of its models",
    ]
    own.write_text(file.read_text())
    (only,) = file_mistakes(file)
    assert only.endswith(f"{own}:1: models: a model's own file has the settings of one model")
    own.write_text("model: m\n")
    assert file_mistakes(file) == []


def test_config_prints_what_each_of_several_models_has_for_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("port: 9000\nmodels:\n  chat: org/model\n  vectors: {model: m, task: embed, max_num_seqs: 3}\n")
    assert main(["config", "--config", str(file), "--changed"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "server:",
        "  port: 9000",
        "models:",
        "  chat:",
        "    model: org/model",
        "  vectors:",
        "    model: m",
        "    task: embed",
        "    max_num_seqs: 3",
    ]


def test_the_shipped_config_files_are_fine(capsys: pytest.CaptureFixture[str]) -> None:
    for file in set((ROOT / "configs").glob("*.yaml")) - {ROOT / "configs" / "ray-serve.yaml"}:  # Ray's, not ours
        assert main(["check", str(file)]) == 0, capsys.readouterr().err
    assert main(["check", "/nowhere.yaml"]) == 2


NUMBERS = dict.fromkeys(
    "running waiting kv_cache_usage prefix_cache_queries prefix_cache_hits preemptions prompt_tokens generation_tokens "
    "padding_tokens engine_restarts".split(),
    0.0,
)
STATE: dict[str, Any] = {
    "uptime_seconds": 3725.0,
    "engine": None,
    "numbers": NUMBERS,
    "steps": {},
    "compilations": {},
    "times": {
        name: {"seconds": 0, "count": 0} for name in ("time_to_first_token", "inter_token_latency", "device_step")
    },
    "refused": [{"time": 0, "route": "POST /x", "status": 400, "param": "n"}],
}


def test_status_is_one_screen() -> None:
    lines = status_lines("http://h:1", {"m": STATE}, ["m"], None)
    assert lines[0].endswith("http://h:1, up 1:02:05")
    assert lines[-1] == "  400 POST /x n"
    assert len(lines) <= 24
    engine = {
        "max_num_seqs": 4,
        "num_kv_blocks": 1000,
        "num_devices": 1,
        "platform": "cpu",
        "kv_dtype": "f",
        "max_model_len": 9,
        "vector_size": None,
    }
    used = STATE | {"engine": engine, "numbers": NUMBERS | {"prefix_cache_queries": 4.0, "prefix_cache_hits": 1.0}}
    text = "\n".join(status_lines("u", {"m": used}, ["m"], "loading"))
    assert "25.0% of prompt tokens found" in text
    assert "not serving: loading" in text
    several = status_lines("u", {"m": used, "n": STATE}, ["m", "alias", "n"], None)
    assert [line for line in several if line.startswith(("m", "n:"))] == ["models        m, alias, n", "m:", "n:"]
    assert sum(line.startswith("requests ") for line in several) == 2
    assert several[several.index("n:") :][1:4] == [
        "requests      0 running, 0 waiting",
        "engine        not ready",
        "restarts      0",
    ]


def test_status_of_a_model_that_embeds_shows_no_cache() -> None:
    engine = {"max_num_seqs": 4, "num_devices": 1, "platform": "cpu", "max_model_len": 256, "vector_size": 384}
    lines = status_lines(
        "u", {"v": STATE | {"engine": engine, "numbers": NUMBERS | {"prompt_tokens": 7.0}}}, ["v"], None
    )
    assert "tokens        7 of texts" in lines
    assert "engine        1 x cpu, vectors of 384, texts of up to 256 tokens" in lines
    assert not [line for line in lines if line.startswith(("KV", "prefix", "preemptions"))]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            {"status": "loading", "phase": "compile", "done": 4, "total": 7, "eta_seconds": 110.5, "model": "tiny"},
            "loading tiny: compile 4/7, about 110 s left",
        ),
        ({"status": "restarting", "phase": "load", "done": 0, "total": 9, "eta_seconds": None}, "restarting: load 0/9"),
        ({"status": "unhealthy", "reason": "the engine died", "model": "b"}, "unhealthy b: the engine died"),
        ({"status": "draining"}, "draining"),
    ],
)
def test_status_says_why_a_server_serves_no_requests(body: dict[str, Any], text: str) -> None:
    assert describe_health(body) == text


def test_status_without_a_server_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert main(["status", "--url", f"http://127.0.0.1:{port}"]) == 1
    assert "jaxserve serve" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (b"", "Remote end closed connection"),
        (b"nonsense\r\n\r\n", "nonsense"),
        (b"HTTP/1.0 200 OK\r\n\r\n[not json", "not a jaxserve server"),
        (b"HTTP/1.0 200 OK\r\n\r\n{}", "not a jaxserve server"),
    ],
    ids=["closes", "no HTTP", "no JSON", "other JSON"],
)
def test_status_of_a_server_that_lives_and_gives_no_state_is_one_line(
    reply: bytes, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(listener: socket.socket) -> None:
        for data in (b"HTTP/1.0 200 OK\r\n\r\n", reply):
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        assert main(["status", "--url", f"http://127.0.0.1:{listener.getsockname()[1]}"]) == 1
        thread.join()
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line


def test_doctor_has_a_fix_for_everything_that_is_wrong(tmp_path: Path) -> None:
    folder = tmp_path / "programs"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = {"model": str(tmp_path), "port": str(taken.getsockname()[1]), "compile_cache": str(folder)}
        config = load_config(flags=flags)
        checks = (doctor._versions, doctor._processors, doctor._memory, doctor._model, doctor._cache, doctor._port)
        findings = {finding.subject: finding for finding in (check(config) for check in checks)}
    assert {name for name, finding in findings.items() if finding.verdict == "wrong"} == {
        "model",
        "compile cache",
        "port",
    }
    assert all(finding.fix for finding in findings.values() if finding.verdict != "ok")
    assert "chmod 0700" in findings["compile cache"].fix


@pytest.mark.parametrize(
    ("mode", "allowed", "verdict"),
    [
        (0o700, os.R_OK | os.W_OK | os.X_OK, "ok"),
        (0o770, os.R_OK | os.W_OK | os.X_OK, "ok"),  # `fsGroup: 0`
        (0o755, os.R_OK | os.X_OK, "note"),
        (0o700, 0, "wrong"),
        (0o777, os.R_OK | os.W_OK | os.X_OK, "wrong"),
    ],
)
def test_doctor_and_the_server_agree_on_a_compile_cache(
    mode: int, allowed: int, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "programs"
    folder.mkdir()
    folder.chmod(mode)
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & ~allowed)
    monkeypatch.setattr(program_cache, "_TRUSTED_GROUP", os.getgid())
    config = load_config(flags={"model": "m", "compile_cache": str(folder)})
    assert doctor._cache(config).verdict == verdict
    assert folder.stat().st_mode & 0o777 == mode, "doctor changes nothing"
    assert (ProgramCache(folder).directory is None) == (verdict == "wrong")


def test_doctor_names_what_is_in_the_way_of_a_compile_cache(tmp_path: Path) -> None:
    (tmp_path / "file").touch(mode=0o755)
    for folder in (tmp_path / "file", tmp_path / "file" / "programs"):
        config = load_config(flags={"model": "m", "compile_cache": str(folder)})
        assert doctor._cache(config).verdict == "wrong"


@pytest.mark.slow
def test_doctor_misses_the_accelerator_that_the_environment_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    finding = doctor._devices(doctor._found_devices())
    assert finding.verdict == "wrong"
    assert finding.fix
    if finding.text.startswith("only the CPU"):  # JAX went on; a version that does not gives its own reason
        assert "JAX_PLATFORMS asks for cuda" in finding.text


def found(platform: str, count: int, gib: float | None, capability: tuple[int, int] | None = None) -> FoundDevices:
    return FoundDevices(count, platform, f"some {platform}", None if gib is None else int(gib * (1 << 30)), capability)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "free_gib", "verdict", "text"),
    [
        (found("cpu", 1, None), 4.0, "ok", r"fit together: a \d\.\d\d, b \d\.\d\d of 4\.0 GiB, estimated"),
        (found("cpu", 1, None), 1.0, "wrong", r"do not fit together: b would fit alone, but not in its share, .* MiB"),
        (found("gpu", 1, 14.0, (7, 5)), 4.0, "ok", r"fit together: a 5\.\d\d, b 5\.\d\d of 7\.0 GiB, estimated"),
        (found("gpu", 1, 0.4, (7, 5)), 4.0, "wrong", "a does not fit alone either; b does not fit alone either"),
        (found("tpu", 4, 15.75), 4.0, "ok", "GiB, each on devices of its own"),
        (found("tpu", 1, 15.75), 4.0, "wrong", "2 models need 2 TPU chips, this machine has 1: a chip belongs to one"),
        (found("tpu", 1, None), 4.0, "note", "not checked: the memory of the devices is not known"),
        (NoDeviceError("no driver", is_hanging=False), 4.0, "note", "not checked: the memory of the devices is not"),
    ],
)
def test_doctor_looks_at_all_models_together(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    devices: FoundDevices | NoDeviceError,
    free_gib: float,
    verdict: str,
    text: str,
) -> None:
    folder = write_config(tmp_path / "small", SMOLLM2)

    def find() -> FoundDevices:
        if isinstance(devices, NoDeviceError):
            raise devices
        return devices

    monkeypatch.setattr(doctor, "find_devices", find)
    monkeypatch.setattr("jaxserve.tools.planning.devices.available_bytes", lambda: int(free_gib * (1 << 30)))
    models = ("--model", f"a={folder}", "--model", f"b={folder}", "--max-model-len", "1024", "--port", "0")
    assert main(["doctor", *models]) == 1, "the folders have no weights"
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines if " model " in line] == [
        ["wrong", "model", "a"],
        ["wrong", "model", "b"],
    ]
    (index,) = (number for number, line in enumerate(lines) if "  all models" in line)
    assert lines[index].startswith(verdict)
    assert re.search(text, lines[index])
    assert (verdict == "ok") == (not lines[index + 1].strip().startswith("fix:"))


@pytest.mark.slow
def test_what_doctor_says_about_a_cache_lets_the_models_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_config(tmp_path / "small", SMOLLM2)
    monkeypatch.setattr("jaxserve.tools.planning.devices.available_bytes", lambda: 1260 << 20)
    flags = {"model": str(folder), "max_model_len": "1024"}
    configs = [load_config(flags=flags | {"served_model_name": name}) for name in "ab"]
    finding = doctor._together(configs, found("cpu", 1, None))
    assert finding.verdict == "wrong"
    advice = re.match(r"--kv-cache-memory (\S+) for all of them; or `jaxserve plan`", finding.fix)
    assert advice is not None
    configs = [load_config(flags=flags | {"served_model_name": name, "kv_cache_memory": advice[1]}) for name in "ab"]
    assert doctor._together(configs, found("cpu", 1, None)).verdict == "ok"


@pytest.mark.slow
@pytest.mark.parametrize(("free", "verdict"), [(300, "wrong"), (1000, "note"), (2400, None)])
def test_doctor_compares_memory_with_what_a_start_takes(
    free: int, verdict: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 1,000 MiB the model fits, and the kernel ends the engine while it compiles."""
    folder = write_config(tmp_path / "small", SMOLLM2)
    monkeypatch.setattr("jaxserve.tools.planning.devices.available_bytes", lambda: free << 20)
    monkeypatch.setattr(doctor, "available_bytes", lambda: free << 20)
    config = load_config(flags={"model": str(folder), "max_model_len": "1024"})
    findings = doctor._start_memory(config, found("cpu", 1, None))
    assert [finding.verdict for finding in findings] == ([] if verdict is None else [verdict])
    assert all(finding.text and finding.fix for finding in findings)
    assert not doctor._start_memory(config, found("gpu", 1, 80))


def test_doctor_looks_for_a_model_of_the_hub_in_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    config = load_config(flags={"model": "org/name"})
    fetched = doctor._model(config)
    assert fetched.verdict == "note" and re.search(r"org/name is not in .*hub, which has [\d.]+ GiB free", fetched.text)
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert doctor._model(config).verdict == "wrong"
    with monkeypatch.context() as patch:
        patch.setattr(doctor.os, "access", lambda path, mode: False)
        finding = doctor._model(config)
        assert (finding.verdict, finding.fix) == ("wrong", "set HF_HOME=DIR")
    nowhere = doctor._model(load_config(flags={"model": "./nowhere.gguf"}))
    assert nowhere.verdict == "wrong" and "found no such path" in nowhere.text


def test_doctor_fetches_no_image_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    pair = write_pair(tmp_path, "smolvlm_tiny")
    model = str(pair.text)
    fetched = doctor._models(load_config(flags={"model": model, "mmproj": "org/name:mmproj.gguf"}))
    assert [(each.subject, each.verdict) for each in fetched] == [("model", "ok"), ("mmproj", "note")]
    assert fetched[1].text.startswith("org/name:mmproj.gguf is not in ")
    (local,) = doctor._models(load_config(flags={"model": model, "mmproj": str(pair.mmproj)}))
    assert local.text.startswith("smolvlm_tiny.gguf with mmproj-smolvlm_tiny.gguf: ")
    (missing,) = doctor._models(load_config(flags={"model": model, "mmproj": "./nowhere.gguf"}))
    assert missing.text == "--mmproj './nowhere.gguf': expected an existing file, or owner/name:FILE.gguf"


def test_doctor_finds_the_weights_of_the_named_file_and_revision_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)

    def verdict(model: str, **flags: str) -> str:
        return doctor._model(load_config(flags={"model": model} | flags)).verdict

    folder = tmp_path / "models--org--name"
    snapshot = folder / "snapshots" / "0123abcd"
    for each in (snapshot, folder / "refs"):
        each.mkdir(parents=True)
    (folder / "refs" / "main").write_text("0123abcd")
    (snapshot / "config.json").touch()
    assert verdict("org/name") == "note", "`jaxserve plan` has fetched the config only"
    (snapshot / "a[1].gguf").touch()
    assert (verdict("org/name:a[1].gguf"), verdict("org/name:b.gguf")) == ("ok", "note")
    assert verdict("org/name") == "note", "a GGUF file is loaded only if it is named"
    (snapshot / "model.safetensors").touch()
    assert verdict("org/name") == "ok"
    assert (verdict("org/name", revision="0123abcd"), verdict("org/name", revision="v2")) == ("ok", "note")


def test_doctor_counts_the_files_of_a_split_gguf_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123abcd" / "Q4"
    snapshot.mkdir(parents=True)
    first = write_decoder(snapshot / "a.gguf", "llama", num_files=3)

    def finding(model: str) -> tuple[str, str]:
        found = doctor._model(load_config(flags={"model": model, "revision": "0123abcd"}))
        return found.verdict, found.text

    size = sum(file.stat().st_size for file in snapshot.iterdir()) / (1 << 30)
    assert finding(str(first)) == ("ok", f"{first.name}: {size:.2f} GiB")
    assert finding(f"org/name:Q4/{first.name}")[0] == "ok"
    last = snapshot / "a-00003-of-00003.gguf"
    last.unlink()
    verdict, text = finding(f"org/name:Q4/{first.name}")
    assert (verdict, text.partition(" at")[0]) == ("note", f"1 of 3 files with weights of org/name:Q4/{first.name}")
    verdict, text = finding(str(first))
    assert verdict == "wrong" and f"{last.name} is missing" in text
    assert finding(f"org/name:Q4/{last.name}")[0] == "wrong"


def test_doctor_finds_that_some_files_of_a_sharded_model_are_not_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    config = load_config(flags={"model": "org/name", "revision": "0123abcd"})
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    index = snapshot / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict(zip("abc", shards, strict=True))}))
    (snapshot / shards[0]).touch()
    (snapshot / shards[1]).symlink_to(tmp_path / "blob")  # of a file whose blob was deleted
    finding = doctor._model(config)
    assert (finding.verdict, finding.text.partition(" at")[0]) == ("note", "2 of 3 files with weights of org/name")
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert doctor._model(config).verdict == "wrong"
    for name in ("blob", f"models--org--name/snapshots/0123abcd/{shards[2]}"):
        (tmp_path / name).touch()
    assert doctor._model(config).verdict == "ok"
    index.write_text("{")
    assert doctor._model(config).verdict == "note"


def test_doctor_leaves_models_of_the_hub_to_the_start() -> None:
    configs = [load_config(flags={"model": "org/name", "served_model_name": name}) for name in "ab"]
    finding = doctor._together(configs, found("cpu", 1, None))
    assert (finding.verdict, finding.text) == ("note", "not checked: a is fetched from the hub at the start")


@pytest.mark.slow
def test_devices_are_asked_in_a_process_that_takes_no_memory() -> None:
    devices = find_devices()
    assert (devices.platform, devices.limit_bytes, devices.capability) == ("cpu", None, None)
    assert devices.count >= 1


CLOSED = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version: 12.3.0\n"
)
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder)\n"


@pytest.mark.parametrize(
    ("module", "cuda", "verdict", "text"),
    [
        (None, None, None, ""),
        (None, 13, "note", "none of NVIDIA's, and jax was installed for CUDA 13"),
        (CLOSED, 13, "wrong", "NVIDIA 535.104.05; CUDA 13, for which jax was installed, needs 580 or newer"),
        (CLOSED, 12, "ok", "NVIDIA 535.104.05"),
        (CLOSED, None, "ok", "NVIDIA 535.104.05"),
        (OPEN, 13, "ok", "NVIDIA 580.65.06"),
    ],
)
def test_doctor_compares_the_driver_with_the_cuda_of_jax(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: str | None,
    cuda: int | None,
    verdict: str | None,
    text: str,
) -> None:
    file = tmp_path / "version"
    if module is not None:
        file.write_text(module)
    monkeypatch.setattr(doctor, "find_spec", lambda name: name if name == f"jax_cuda{cuda}_plugin" else None)
    finding = doctor._driver(file)
    assert (finding and finding.verdict) == verdict
    if finding is not None:
        assert finding.text == text
        assert bool(finding.fix) == (verdict != "ok")


def test_doctor_looks_at_the_shared_memory_of_several_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: SimpleNamespace(total=64 << 20))
    assert not doctor._shared_memory(found("gpu", 1, 80), tmp_path) + doctor._shared_memory(
        found("cpu", 8, None), tmp_path
    )
    (finding,) = doctor._shared_memory(found("gpu", 2, 80), tmp_path)
    assert "64 MiB" in finding.text and "--shm-size" in finding.fix
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: SimpleNamespace(total=8 << 30))
    assert not doctor._shared_memory(found("gpu", 2, 80), tmp_path)


def test_doctor_warns_of_a_port_that_is_open_to_all() -> None:
    config = load_config(flags={"model": "m", "host": "0.0.0.0", "port": "0"})
    assert doctor._port(config).verdict == "note"
    with_key = load_config(flags={"model": "m", "host": "0.0.0.0", "port": "0", "api_key": "k"})
    assert doctor._port(with_key).verdict == "ok"


def test_doctor_finds_what_is_no_name_of_a_host() -> None:
    finding = doctor._port(load_config(flags={"model": "m", "host": "a..b"}))
    assert finding.verdict == "wrong" and "--host" in finding.fix


def test_a_config_file_that_cannot_be_read_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"/nowhere: No such file"):
        file_mistakes(Path("/nowhere"))
