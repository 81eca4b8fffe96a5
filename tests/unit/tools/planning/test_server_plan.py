"""`jaxserve plan` of several models: their shares of a device, one verdict, and advice that holds when it is followed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jaxserve.cli.main import main
from jaxserve.tools.planning.devices import Rates
from tests.unit.tools.planning.configs import LLAMA_8B, LLAMA_70B, SMOLLM2, write_config

BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
}
pytestmark = pytest.mark.slow
SHAPES = {"8b": LLAMA_8B, "70b": LLAMA_70B, "small": SMOLLM2, "bert": BERT}


@pytest.fixture(autouse=True)
def made_up_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured in these tests."""
    rates = Rates(30e9, 2e11, 2e11, 2e11, 2e11, "made up")
    monkeypatch.setattr("jaxserve.tools.planning.planner.measure_cpu_rates", lambda: rates)


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    """The path of each model."""
    return {name: str(write_config(tmp_path / name, shape)) for name, shape in SHAPES.items()}


def planned(capsysbinary: pytest.CaptureFixture[bytes], *words: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the JSON of `jaxserve plan WORDS --json --no-compile`."""
    code = main(["plan", *words, "--json", "--no-compile"])
    captured = capsysbinary.readouterr()
    assert captured.err == b""
    return code, json.loads(captured.out)


def named(folders: dict[str, str], **models: str) -> list[str]:
    return [word for name, shape in models.items() for word in ("--model", f"{name}={folders[shape]}")]


def held(plan: dict[str, Any]) -> int:
    memory = plan["memory"]
    return int(memory["weights_bytes"] + memory["kv_bytes"] + memory["workspace_bytes"])


def test_models_of_a_cpu_have_the_memory_that_earlier_ones_leave(
    folders: dict[str, str], capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    words = named(folders, chat="small", vectors="bert", more="small")
    code, plan = planned(capsysbinary, *words, "--device-memory", "8GiB")
    chat, vectors, more = plan["models"].values()
    assert (code, plan["fits"], plan["sharing"], list(plan["models"])) == (
        0,
        True,
        "memory",
        ["chat", "vectors", "more"],
    )
    assert chat["device"]["limit_bytes"] == 8 << 30
    assert vectors["device"]["limit_bytes"] == (8 << 30) - held(chat)
    assert more["device"]["limit_bytes"] == (8 << 30) - held(chat) - held(vectors)
    assert more["cache"]["num_tokens"] < chat["cache"]["num_tokens"], "a quarter of less"


def test_a_cpu_that_holds_one_of_two_models_says_which_cache_lets_it_hold_both(
    folders: dict[str, str], capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    words = [*named(folders, a="small", b="small"), "--device-memory", "1500MB", "--max-model-len", "2048"]
    code, plan = planned(capsysbinary, *words)
    assert (code, plan["fits"]) == (1, False)
    assert [one["fits"] for one in plan["models"].values()] == [True, False]
    assert re.fullmatch(r"b would fit alone, but not in its share, [\d.]+ MiB", plan["reason"])
    (advice,) = plan["advice"]
    flags = advice.removesuffix(" for all of them").split()
    assert flags[0] == "--kv-cache-memory"
    assert planned(capsysbinary, *words, *flags)[0] == 0


def test_a_gpu_is_divided_as_the_server_divides_it(
    folders: dict[str, str], capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    words = named(folders, big="8b", small="small")
    code, plan = planned(capsysbinary, *words, "--device", "h200")
    assert (code, plan["sharing"], plan["device"]) == (0, "memory", "NVIDIA H200 SXM 141 GB")
    _, alone = planned(capsysbinary, folders["8b"], "--device", "h200")
    limits = [one["device"]["limit_bytes"] for one in plan["models"].values()]
    assert limits == pytest.approx([alone["device"]["limit_bytes"] / 2] * 2, rel=1e-6)
    code, plan = planned(capsysbinary, *words, "--device", "h200x2")
    assert (code, plan["sharing"], plan["device"]) == (0, "own devices", "2 x NVIDIA H200 SXM 141 GB")
    own = plan["models"]["big"]
    assert own["memory"] == alone["memory"], "each as if it were alone"


def test_fractions_that_are_proposed_for_a_gpu_hold(
    folders: dict[str, str], tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    words = named(folders, big="8b", small="small")
    code, plan = planned(capsysbinary, *words, "--device", "rtx4090")
    assert (code, plan["models"]["small"]["fits"]) == (1, True)
    assert plan["reason"].startswith("big would fit alone, but not in its share, 11.23 GiB")
    more, fractions = plan["advice"]
    assert planned(capsysbinary, *words, *more.partition(":")[0].split())[0] == 0
    found = re.fullmatch(r"memory_fraction ([\d.]+) for big, ([\d.]+) for small, each among .*", fractions)
    assert found is not None
    file = tmp_path / "server.yaml"
    file.write_text(
        f"models:\n  big: {{model: {folders['8b']}, memory_fraction: {found[1]}}}\n"
        f"  small: {{model: {folders['small']}, memory_fraction: {found[2]}}}\n"
    )
    assert planned(capsysbinary, "--config", str(file), "--device", "rtx4090")[0] == 0
    moves = [one["change"] for one in plan["models"]["big"]["advice"]]
    assert moves and not any(one.startswith(("--device", "--tensor", "--memory-fraction")) for one in moves)


def test_a_model_that_fits_nowhere_is_named(
    folders: dict[str, str], capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    code, plan = planned(capsysbinary, *named(folders, huge="70b", small="small"), "--device", "rtx4090")
    assert (code, plan["reason"], plan["advice"]) == (1, "huge does not fit alone either", [])


def test_chips_are_counted_and_never_shared(folders: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", *named(folders, big="8b", small="small"), "--no-compile"]
    assert main([*words, "--device", "v5e-1"]) == 2
    assert "2 models need 2 TPU chips, this machine has 1: a chip belongs to one model" in capsys.readouterr().err
    assert main([*words, "--device", "v6e"]) == 0
    assert capsys.readouterr().out.startswith("big + small on 2 x Cloud TPU v6e: fit together\n")
    assert main([*words, "--device", "h200x8", "--hosts", "2"]) == 2
    assert "--hosts 2: several models are served on one host" in capsys.readouterr().err


def test_the_verdict_comes_first_then_a_row_and_tables_of_each_model(
    folders: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = named(folders, big="8b", vectors="bert")
    assert main(["plan", *words, "--device", "h200", "--no-compile"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("big + vectors on NVIDIA H200 SXM 141 GB: fit together\n")
    rows = [line.split() for line in out.splitlines()]
    assert [row[0] for row in rows if row[-1:] == ["fits"] and "on" not in row] == ["big", "vectors"]
    assert "\nbig (8b) on NVIDIA H200 SXM 141 GB: fits\n" in out
    assert "\nvectors (bert) on NVIDIA H200 SXM 141 GB: fits\n" in out
    assert main(["plan", *named(folders, a="8b", b="8b"), "--device", "rtx4090", "--no-compile"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a + b on NVIDIA GeForce RTX 4090 24 GB: do not fit together"
    assert "what to change: --device rtx4090x2: devices of its own for each model" in lines


def test_the_models_of_a_config_file_are_planned_like_those_of_flags(
    folders: dict[str, str], tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(f"models:\n  big: {folders['8b']}\n  vectors: {{model: {folders['bert']}}}\n")
    by_flags = planned(capsysbinary, *named(folders, big="8b", vectors="bert"), "--device", "h200")
    assert planned(capsysbinary, "--config", str(file), "--device", "h200") == by_flags
    assert by_flags[1]["models"]["vectors"]["task"] == "embed"


def test_a_model_that_embeds_is_planned_alone_too(
    folders: dict[str, str], capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    code, plan = planned(capsysbinary, folders["bert"], "--device-memory", "1GiB")
    d, f, layers = 32, 64, 2
    matrices = layers * (4 * (d * d + d) + d * f + f + f * d + d + 4 * d)
    tables = (100 + 128 + 2) * d + 2 * d
    assert (code, plan["task"], plan["model"]["num_parameters"]) == (0, "embed", matrices + tables)
    assert plan["weights_bytes"] == 4 * (matrices + tables)
    assert (plan["step"]["max_model_len"], plan["cache"], plan["memory"]["kv_bytes"]) == (128, None, 0)
    code, plan = planned(capsysbinary, folders["bert"], "--device-memory", "64KiB")
    assert (code, plan["fits"]) == (1, False)
    assert "are more than the 64.0 KiB" in plan["reason"]


def test_a_decoder_that_embeds_keeps_the_pages_of_one_step(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """The models have few layers: these plans trace each of them."""
    small = str(write_config(tmp_path / "small", SMOLLM2 | {"num_hidden_layers": 3}))
    large = str(write_config(tmp_path / "large", LLAMA_70B | {"num_hidden_layers": 7}))
    code, plan = planned(capsysbinary, small, "--task", "embed", "--device", "v5e")
    _, generating = planned(capsysbinary, small, "--device", "v6e")
    assert (code, plan["weights_bytes"]) == (0, generating["weights_bytes"])
    most = plan["step"]["max_num_batched_tokens"] + 64 * (plan["step"]["max_num_seqs"] + 1)
    assert 0 < plan["memory"]["kv_bytes"] <= most * generating["kv_bytes_per_token"]
    code, _ = planned(capsysbinary, large, "--task", "embed", "--device", "rtx4090", "--dtype", "float32")
    assert code == 1
