"""`jaxserve plan`: exit codes, what it prints, and advice that holds when it is followed."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxserve.cli import plan as plan_command
from jaxserve.cli.main import main
from jaxserve.runner.slots import slots_shape
from jaxserve.tools.planning.devices import Rates
from tests.unit.tools.planning.configs import LLAMA_8B, LLAMA_70B, SMOLLM2, TINY, write_config

ROOT = Path(__file__).parents[4]
SHAPES = {"llama-8b": LLAMA_8B, "llama-70b": LLAMA_70B, "smollm2": SMOLLM2}


@pytest.fixture(autouse=True)
def made_up_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured in these tests."""
    rates = Rates(30e9, 2e11, 2e11, 2e11, 2e11, "made up")
    monkeypatch.setattr("jaxserve.tools.planning.planner.measure_cpu_rates", lambda: rates)


def planned(capsysbinary: pytest.CaptureFixture[bytes], *words: str) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of `jaxserve plan WORDS --json --no-compile`."""
    code = main(["plan", *words, "--json", "--no-compile"])
    return code, json.loads(capsysbinary.readouterr().out)


def test_what_fits_exits_0_with_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_config(tmp_path / "llama-8b", LLAMA_8B)
    assert main(["plan", str(folder), "--device", "h200", "--no-compile"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("llama-8b on NVIDIA H200 SXM 141 GB: fits\n")
    for text in (
        "weights     14.96 GiB  bfloat16, 8,030,261,248 parameters",
        "128.0 KiB a token",
        "estimated from shapes",
        "decode  2 4 8 16 32 64 128 256 rows",
        "mixed   128 256 512 1024 2048 tokens",
        "--max-num-seqs 256",
        "317 weights",
        "4,800 GB/s and 989 TFLOP/s bfloat16 (published spec: NVIDIA H200 data sheet)",
    ):
        assert text in out


@pytest.mark.slow
def test_what_does_not_fit_exits_1_and_says_what_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_config(tmp_path / "llama-70b", LLAMA_70B)
    assert main(["plan", str(folder), "--device", "h200", "--no-compile"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "llama-70b on NVIDIA H200 SXM 141 GB: does not fit" in out
    assert "no memory left for the KV cache: 131.55 of 133.95 GiB are in use" in out
    assert "--tensor-parallel-size 2 131,072" in out
    assert "Decode" not in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "words", "kinds"),
    [
        ("llama-70b", "--device h200", ["--quantization", "--tensor-parallel-size"]),
        ("llama-70b", "--device v5e", ["--device"]),
        ("llama-8b", "--device v5e", ["--quantization", "--tensor-parallel-size", "--device"]),
        ("llama-8b", "--device h200 --dtype float32 --max-model-len 131072 --tensor-parallel-size 1", []),
        (
            "llama-8b",
            "--device a100 --dtype float32 --max-model-len 131072 --memory-fraction 0.75",
            ["--dtype", "--quantization", "--max-model-len", "--tensor-parallel-size", "--device"],
        ),
        (
            "llama-8b",
            "--device a100 --max-model-len 32768 --kv-cache-memory 1GiB",
            ["--max-model-len", "--kv-cache-memory"],
        ),
        ("llama-8b", "--device v6e --kv-cache-memory 40GiB", ["--kv-cache-memory"]),
        ("llama-8b", "--device v6e --max-model-len 120000", ["--max-model-len", "--memory-fraction"]),
        ("llama-8b", "--device cpu --device-memory 20GB", ["--dtype", "--quantization"]),
        ("smollm2", "--device cpu --device-memory 700MB --max-model-len 8192", ["--max-model-len"]),
    ],
)
def test_advice_holds_when_it_is_followed(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes], model: str, words: str, kinds: list[str]
) -> None:
    folder = str(write_config(tmp_path / model, SHAPES[model]))
    code, plan = planned(capsysbinary, folder, *words.split())
    assert (code, plan["fits"], bool(plan["advice"])) == (1, False, True) if kinds else (0, True, False)
    given = [" ".join(word for word in entry["change"].split() if word.startswith("--")) for entry in plan["advice"]]
    assert [kind for kind in kinds if kind not in given] == []
    for entry in plan["advice"]:
        code, followed = planned(capsysbinary, folder, *words.split(), *entry["change"].split())
        assert (code, followed["fits"]) == (0, True), entry
        assert followed["step"]["max_model_len"] == entry["max_model_len"]
        assert followed["cache"]["num_tokens"] == entry["num_kv_tokens"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-model-len", "200000"], "--max-model-len 200000 is more than the 131072 tokens the model was made for"),
        (["--device", "h300"], "--device h300: one of cpu, a100"),
        (["--device-memory", "lots"], "--device-memory 'lots': expected a size like 512MiB or 2GiB"),
        (["--max-num-seqs", "0"], "--max-num-seqs '0': expected an integer, at least 1 and at most 4096"),
        (["--cpu-kernels", "native"], "--cpu-kernels native: only on CPUs, not on gpu"),
        (["--attention-backend", "triton"], "--attention-backend 'triton': expected one of auto, reference, pallas"),
        (["--port", "1"], "unknown option `--port`"),
    ],
)
def test_a_mistake_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    folder = write_config(tmp_path, LLAMA_8B)
    assert main(["plan", str(folder), "--no-compile", "--device", "h200", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_model_that_is_not_supported_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_config(tmp_path, LLAMA_8B | {"architectures": ["RwkvForCausalLM"]})
    assert main(["plan", str(folder), "--no-compile"]) == 2
    assert "RwkvForCausalLM" in capsys.readouterr().err


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="this jax has no Mosaic GPU kernels")
@pytest.mark.parametrize("device", ["rtx4090", "l40s", "a100", "rtx5090"])
def test_a_plan_with_an_8_bit_cache_names_the_attention_kernel(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes], device: str
) -> None:
    folder = str(write_config(tmp_path, LLAMA_8B))
    for kv_dtype in ("fp8", "int8"):
        _, plan = planned(capsysbinary, folder, "--device", device, "--kv-cache-dtype", kv_dtype)
        assert any("attention: our kernel on mma.sync" in note for note in plan["notes"])


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="this jax has no Mosaic GPU kernels")
def test_a_plan_for_a_b200_names_the_kernels_for_prompts_and_for_decode_steps(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    folder = str(write_config(tmp_path, LLAMA_8B))
    for kv_dtype, kernel in (("auto", "on tcgen05 for prompts and on mma.sync"), ("fp8", "our kernel on mma.sync")):
        _, plan = planned(capsysbinary, folder, "--device", "b200", "--kv-cache-dtype", kv_dtype)
        assert any(kernel in note for note in plan["notes"]), plan["notes"]


def test_settings_of_the_environment_count(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXSERVE_MAX_NUM_SEQS", "7")
    _, plan = planned(capsysbinary, str(write_config(tmp_path, LLAMA_8B)), "--device", "h200")
    assert plan["step"]["max_num_seqs"] == 7


def test_a_compiler_that_is_not_there_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxserve.tools.planning.targets._is_installed", lambda package: False)
    assert main(["plan", str(write_config(tmp_path, LLAMA_8B)), "--device", "v6e"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("libtpu is not installed") == 1
    assert "the workspace is estimated" in out


@pytest.mark.slow
def test_a_plan_touches_no_device(tmp_path: Path) -> None:
    """On a machine where jax can start no backend at all, a plan without compiling still works."""
    folder = write_config(tmp_path, LLAMA_8B)
    done = subprocess.run(
        [sys.executable, "-m", "jaxserve.cli.main", "plan", str(folder), "--device", "h200", "--no-compile"],
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "no_such_platform"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_cpu_compiler_says_what_a_small_model_needs(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    words = ["--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--kv-cache-memory", "1MiB", "--all-programs"]
    code = main(["plan", str(write_config(tmp_path, TINY)), *words, "--json"])
    plan = json.loads(capsysbinary.readouterr().out)
    assert code == plan_command.EXIT_FITS
    step = plan["step"]
    kept = plan["memory"]["kv_bytes"] + 4 * math.prod(slots_shape(2, TINY["vocab_size"]))
    assert len(plan["programs"]) == len(step["decode_rows"]) + len(step["mixed_tokens"])
    for program in plan["programs"]:
        assert program["aliased_bytes"] == kept, "pool and slots stay in their buffers"
        assert program["argument_bytes"] >= kept + plan["weights_bytes"]
        assert program["temp_bytes"] > 0
    assert plan["memory"]["workspace_is"] == "compiled"
