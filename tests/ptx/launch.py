"""Pallas kernels, compiled for a GPU that is only described, and run by the emulator on numpy's arrays.

`emulated` replaces `plgpu.kernel`: a kernel that is made within it is compiled as usual, and the compiler leaves its PTX
and its host function in a folder (Mosaic GPU's own `MOSAIC_GPU_DUMP_TO`). Only these files are read. Results of one
launch under several schedules must be equal to the last bit.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.aot.devices import H200, Target
from tests.ptx.decode import decode
from tests.ptx.hazards import Hazard
from tests.ptx.host import Host
from tests.ptx.machine import Program, Schedule, run_grid
from tests.ptx.memory import Array, Bytes, GlobalMemory
from tests.ptx.parser import Source, parse

SCHEDULES = (Schedule(seed=0, copies=0.3, matmuls=0.3), Schedule(seed=1, copies=0.01, matmuls=0.0))
"""The second one does copies and matmuls as late as it can."""
_PALLAS = "jax.experimental.pallas.mosaic_gpu"


@dataclass(frozen=True)
class Result:
    """An array that a kernel made."""

    data: np.ndarray
    is_written: np.ndarray
    """True for each number that was written."""

    @classmethod
    def of(cls, array: Array, kind: jax.ShapeDtypeStruct) -> Result:
        is_written = array.is_written.reshape(*kind.shape, kind.dtype.itemsize)
        return cls(array.data.view(kind.dtype).reshape(kind.shape), np.all(is_written, axis=-1))


@dataclass(frozen=True)
class Compiled:
    """A kernel, and the compiler's log of what it does on the host."""

    source: Source
    program: Program
    log: str
    most_shared_bytes: int
    """Shared memory that a block of its device has."""
    updated: tuple[int, ...] = ()
    """Operands that it updates in place: its last results."""

    @classmethod
    def of(cls, ptx: str, log: str, most_shared_bytes: int, updated: tuple[int, ...] = ()) -> Compiled:
        """Raises NotModelled."""
        source = parse(ptx)
        return cls(source, decode(source), log, most_shared_bytes, updated)

    def run(
        self, operands: Sequence[np.ndarray], results: Sequence[jax.ShapeDtypeStruct], schedule: Schedule
    ) -> list[Result]:
        """One launch. Raises Hazard and NotModelled."""
        own = results[: len(results) - len(self.updated)]
        sizes = [int(np.prod(each.shape)) * each.dtype.itemsize for each in own]
        memory = GlobalMemory([_stored(each) for each in operands], sizes, self.updated)
        host = Host(memory.arrays)
        host.run(self.log)
        launch = host.launch(self.source.parameters)
        if launch.shared_bytes > self.most_shared_bytes:
            raise Hazard(f"{launch.shared_bytes} bytes of shared memory: a block has {self.most_shared_bytes}")
        run_grid(self.program, launch, memory, schedule)
        made = zip(memory.arrays[len(operands) :], results, strict=True)
        return [Result.of(array, each) for array, each in made]


@dataclass(frozen=True)
class Launched:
    """A kernel, what it was given, the shapes and types of its results, and these."""

    compiled: Compiled
    operands: list[np.ndarray]
    kinds: list[jax.ShapeDtypeStruct]
    results: list[Result]


def skip_without_compiler() -> None:
    """Skip the test if kernels for GPUs cannot be compiled."""
    if not H200.has_compiler:
        pytest.skip(f"{H200.compiler} is not installed: nothing compiled for GPUs (make kernels-check)")


@contextmanager
def emulated(
    schedules: Sequence[Schedule] = SCHEDULES, target: Target = H200, *, is_first: bool = False
) -> Iterator[list[Launched]]:
    """Within it, kernels run in the emulator, and what is around them eagerly; gives the launches so far.

    is_first: the process compiles for no other device, before or later.
    """
    skip_without_compiler()
    plgpu = importlib.import_module(_PALLAS)
    make_kernel = plgpu.kernel
    launches: list[Launched] = []
    if target is not H200 and not is_first:
        _assemble_for_hopper_first(make_kernel)

    def emulated_kernel(body: Callable[..., None], **options: Any) -> Callable[..., Any]:
        own_kinds, structure = jax.tree.flatten(options["out_type"])

        def launch(*operands: Any) -> Any:
            updated = tuple(i for i, each in enumerate(operands) if isinstance(each, jax.Ref))
            values = [each[...] if i in updated else each for i, each in enumerate(operands)]
            kinds = [*own_kinds, *(jax.ShapeDtypeStruct(values[i].shape, values[i].dtype) for i in updated)]
            compiled = compile_kernel(make_kernel(body, **options), values, target, updated)

            def run(*given: jax.Array) -> list[np.ndarray]:
                arrays = [np.asarray(each) for each in given]
                results = _same_results([compiled.run(arrays, kinds, schedule) for schedule in schedules])
                launches.append(Launched(compiled, arrays, kinds, results))
                return [each.data for each in results]

            is_traced = any(isinstance(each, jax.core.Tracer) for each in values)
            made = list(jax.pure_callback(run, kinds, *values) if is_traced else map(jnp.asarray, run(*values)))
            for i in reversed(updated):
                operands[i][...] = made.pop()
            return jax.tree.unflatten(structure, made)

        return launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plgpu, "kernel", emulated_kernel)
        yield launches


def _assemble_for_hopper_first(make_kernel: Callable[..., Any]) -> None:
    """Compile an empty kernel for Hopper.

    Mosaic GPU (jax 0.11.2 and 0.12.0) has all kernels of a process assembled for the architecture of the first one, and
    fails if a later one needs a newer architecture. Only their PTX is of interest here.
    """
    result = jax.ShapeDtypeStruct((128,), jnp.float32)
    kernel = make_kernel(lambda result_ref: None, out_type=result, grid=(1,), grid_names=("program",))
    (device,) = H200.devices(1)
    with jax.disable_jit(False), jax.default_device(device):
        jax.jit(kernel, out_shardings=jax.sharding.SingleDeviceSharding(device)).lower().compile()


def compile_kernel(
    kernel: Callable[..., Any], operands: Sequence[jax.Array], target: Target, updated: tuple[int, ...] = ()
) -> Compiled:
    """The kernel for operands of these shapes and types. updated: operands that it updates in place."""

    def call(*arrays: jax.Array) -> Any:
        given: list[Any] = [jax.new_ref(each) if i in updated else each for i, each in enumerate(arrays)]
        return kernel(*given), [jax.freeze(given[i]) for i in updated]

    (device,) = target.devices(1)
    sharding = jax.sharding.SingleDeviceSharding(device)
    shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding) for each in operands]
    with jax.disable_jit(False), jax.default_device(device):
        lowered = jax.jit(call).lower(*shapes)
        name = target.name, lowered.as_text()
        if name not in _WRITTEN:
            _WRITTEN[name] = _written(lowered)
    assert target.device.cuda is not None
    return Compiled.of(*_WRITTEN[name], target.device.cuda.shared_bytes_per_block, updated)


def _written(lowered: jax.stages.Lowered) -> tuple[str, str]:
    with tempfile.TemporaryDirectory(prefix="jaxserve-ptx-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOSAIC_GPU_DUMP_TO", folder)
        lowered.compile()
        written = [*Path(folder).glob("*.ptx"), *Path(folder).glob("*mlir-passes.log")]
        assert len(written) == 2, "no PTX: the compiler does not write the same kernel twice in a process"
        ptx, log = (file.read_text(encoding="utf-8") for file in written)
        return ptx, log


_WRITTEN: dict[tuple[str, str], tuple[str, str]] = {}
"""PTX and log of each kernel of this process, by device and program: the compiler does not write the same kernel twice."""


def _same_results(runs: Sequence[list[Result]]) -> list[Result]:
    for run in runs[1:]:
        for first, other in zip(runs[0], run, strict=True):
            if first.data.tobytes() != other.data.tobytes():
                raise Hazard("a result depends on the order in which warps, copies and matmuls take their turns")
    return runs[0]


def _stored(array: np.ndarray) -> Bytes:
    """Return the bytes of an array on a device: 4-bit numbers two in a byte, the first one in its lower half."""
    if array.dtype == ml_dtypes.int4:
        halves: Bytes = array.astype(np.int8).view(np.uint8).reshape(-1, 2) & np.uint8(15)
        packed: Bytes = halves[:, 0] | halves[:, 1] << np.uint8(4)
        return packed
    return np.frombuffer(array.tobytes(), np.uint8).copy()
