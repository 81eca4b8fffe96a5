"""A processor gets the best library that was built for it, and never one that it cannot run."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jaxserve_kernels.native import build as build_module
from jaxserve_kernels.native import library, processors
from jaxserve_kernels.native.build import COMPILERS
from jaxserve_kernels.native.processors import GENERATIONS, Generation

AMX, VNNI, AVX512, AVX2, NEON = GENERATIONS
COMPILER = next(filter(None, map(shutil.which, COMPILERS)), None)
ARM_COMPILER = shutil.which("aarch64-linux-gnu-g++")

SPELLED = {
    "__BMI__": "bmi1",
    "__CRC32__": "sse4_2",
    "__GCC_HAVE_SYNC_COMPARE_AND_SWAP_16": "cx16",
    "__LAHF_SAHF__": "lahf_lm",
    "__LZCNT__": "abm",
    "__SSE3__": "pni",
    "__EVEX256__": "avx512vl",
    "__EVEX512__": "avx512f",
}
"""Macros of features that /proc/cpuinfo calls something else, or counts to another."""


def plain(name: str) -> str:
    return name.replace("_", "").lower()


def run_on(features: frozenset[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "processor_flags", lambda: f"flags : fpu {' '.join(sorted(features))}")
    monkeypatch.setattr(library, "processor_flags", processors.processor_flags)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(library, "BUILT", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        (AMX.features, AMX),
        (VNNI.features | {"amx_tile"}, VNNI),
        (AVX512.features, AVX512),
        (VNNI.features - {"avx512bw"}, AVX2),
        (AVX2.features, AVX2),
        (AVX2.features - {"fma"}, None),
        (NEON.features | {"sve", "i8mm"}, NEON),
        (NEON.features - {"asimddp"}, None),
        (frozenset(), None),
    ],
)
def test_a_processor_gets_the_best_generation_that_it_belongs_to(
    features: frozenset[str], expected: Generation | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for generation in GENERATIONS:
        library.library_file(generation).touch()
    run_on(features, monkeypatch)
    assert library.built_library() == (None if expected is None else library.library_file(expected))


def test_a_library_for_one_processor_is_preferred_there_and_left_alone_elsewhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_on(VNNI.features, monkeypatch)
    own = library.library_file()
    own.touch()
    library.library_file(AVX2).touch()
    assert library.built_library() == own
    run_on(VNNI.features | {"avx512_fp16"}, monkeypatch)
    assert library.built_library() == library.library_file(AVX2)


def test_only_a_library_for_this_host_belongs_to_one_jaxlib(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel's libraries serve later versions: XLA accepts handlers of older versions of its FFI."""
    own, portable = library.library_file(), library.library_file(AVX2)
    monkeypatch.setattr(library, "version", lambda _: "99.0")
    library._fingerprint.cache_clear()
    assert library.library_file() != own
    assert library.library_file(AVX2) == portable


def macros(compiler: str | None, *flags: str) -> set[str]:
    assert compiler is not None
    command = [compiler, *flags, "-dM", "-E", "-x", "c++", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {line.split()[1] for line in done.stdout.splitlines()}


@pytest.mark.parametrize("line", ["flags\t\t: fpu avx2 fma", "Features\t: fp asimd asimddp"], ids=["x86_64", "aarch64"])
def test_features_are_read_on_every_machine(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\n{line}\n")
    monkeypatch.setattr(processors, "CPU_FILE", str(file))
    assert processors.processor_flags.__wrapped__() == line + "\n"


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("generation", [AMX, VNNI, AVX512, AVX2], ids=lambda generation: generation.name)
def test_the_compiler_uses_nothing_that_the_processor_was_not_asked_for(generation: Generation) -> None:
    """A server would otherwise die of an illegal instruction."""
    gained = macros(COMPILER, *generation.compiler_flags) - macros(COMPILER, "-march=x86-64")
    used = {plain(SPELLED.get(name, name)) for name in gained if not name.startswith("__FP_FAST_FMA")}
    assert used >= {"avx2", "fma"}
    assert used <= set(map(plain, generation.features))


@pytest.mark.skipif(ARM_COMPILER is None, reason="no compiler for ARM64")
def test_the_compiler_for_arm64_uses_nothing_that_the_processor_was_not_asked_for() -> None:
    gained = macros(ARM_COMPILER, *NEON.compiler_flags) - macros(ARM_COMPILER, "-march=armv8-a")
    used = {name.removeprefix("__ARM_FEATURE_") for name in gained}
    assert used == {"ATOMICS", "CRC32", "DOTPROD", "QRDMX"}
    assert NEON.features >= {"atomics", "crc32", "asimddp", "asimdrdm"}


@pytest.mark.slow
@pytest.mark.skipif(ARM_COMPILER is None, reason="no compiler for ARM64")
def test_a_library_for_arm64_is_compiled_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "FLAGS", tuple(flag.replace("-O3", "-O0") for flag in build_module.FLAGS))
    file = build_module.build(NEON)
    assert file == library.library_file(NEON)
    machine = int.from_bytes(file.read_bytes()[18:20], "little")  # e_machine of its ELF header
    assert machine == 183, "EM_AARCH64"
    assert {b"jaxserve_matmul", b"jaxserve_matmul_int8"} <= set(file.read_bytes().split(b"\0"))


def test_a_machine_without_kernels_and_a_missing_cross_compiler_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    with pytest.raises(build_module.BuildError, match="aarch64-linux-gnu-g\\+\\+"):
        build_module.build(NEON)
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(build_module.BuildError, match="no native kernels for riscv64"):
        build_module.build()


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.skipif(not AVX2.is_here, reason="no AVX2 here")
def test_a_library_for_many_processors_multiplies(tmp_path: Path) -> None:
    """In a process of its own: JAX takes a kernel's name once. The compiler optimises nothing, which takes it half as long."""
    program = f"""
import pathlib, numpy as np
from jaxserve_kernels.matmul import matmul
from jaxserve_kernels.native import library, register
from jaxserve_kernels.native import build as compiler
from jaxserve_kernels.native.processors import GENERATIONS
compiler.FLAGS = tuple(flag.replace("-O3", "-O0") for flag in compiler.FLAGS)
library.BUILT = pathlib.Path({str(tmp_path)!r})
assert register() is None
file = compiler.build(next(generation for generation in GENERATIONS if generation.name == "avx2"))
assert register() == file
x, weight = np.random.default_rng(1).normal(size=(2, 5, 64)).astype(np.float32)
np.testing.assert_allclose(matmul(x, weight, backend="native"), x @ weight.T, atol=1e-4)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
