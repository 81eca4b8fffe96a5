"""Executes the host side of a compiled launch: the arrays, tensor maps and sizes that it passes to the kernel.

Mosaic GPU makes a function for the host beside the kernel. It is executed here as the compiler's log shows it before its
last pass, when it consists of a few of LLVM's operations: constants, structures, pointers, and calls of two functions of
the runtime. So the launch is the compiled one, and no private function of jax is looked into.

Pointers are pairs of an object and a place in it, in whatever the object consists of.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.ptx.hazards import NotModelled
from tests.ptx.machine import Launch
from tests.ptx.memory import Array
from tests.ptx.operands import PARAMETER_BASE
from tests.ptx.tensor_map import TensorMap, in_bytes, packed

_LAST_PASS = "// -----// IR Dump Before ReconcileUnrealizedCastsPass: reconcile-unrealized-casts ('builtin.module'"
_FUNCTION = re.compile(r"llvm\.func @(?!_mlir_ciface)\w+_mosaic_gpu\(([^\n]*)\{\n(.*?)\n  \}", re.S)
_STATEMENT = re.compile(r"(?:(%[\w#]+) = )?(llvm\.[\w.]+|builtin\.unrealized_conversion_cast)(.*)")
_NAME = re.compile(r"%\w+")
_ITEM_BITS = {0: 4, 1: 8, 2: 16, 3: 32, 5: 16, 6: 32, 7: 16}
"""Bits of a number, by the runtime's number of its type."""
_SHARED_BYTES, _PARAMETERS = 10, 13
"""Among the arguments of a launch; before them grid, cluster and block, each in three numbers."""


@dataclass(frozen=True)
class Pointer:
    """Into an object that has a name."""

    of: str
    place: int = 0


Value = Any
"""A number, a Pointer, or a structure: its values by place, written as in the text."""


@dataclass
class Host:
    """The function, executed for arrays."""

    arrays: Sequence[Array]
    values: dict[str, Value] = field(default_factory=dict)
    memory: dict[Pointer, Value] = field(default_factory=dict)
    tensor_maps: dict[Pointer, TensorMap] = field(default_factory=dict)
    launched: list[Value] = field(default_factory=list)
    """Arguments of the launch."""

    def run(self, log: str) -> None:
        """Every statement of the function in the log of the compiler's passes."""
        found = _FUNCTION.search(log, log.rindex(_LAST_PASS))
        if found is None:
            raise NotModelled("no function for the host in the log")
        arguments = _NAME.findall(found[1])
        self.values.update({name: Pointer(name) for name in arguments})
        self.memory.update(
            {Pointer(name, i): Pointer(f"array {i}") for name in arguments for i in range(len(self.arrays))}
        )
        for line in found[2].splitlines():
            self._execute(re.sub(r" loc\(.*", "", line.strip()))

    def launch(self, parameters: Sequence[str]) -> Launch:
        """Return what was launched. parameters: the kernel's parameters, in order."""
        grid, block = self.launched[1:4], self.launched[7:10]
        if grid[1:] != [1, 1] or block[1:] != [1, 1]:
            raise NotModelled(f"a grid of {grid} blocks of {block} threads")
        values, first_map = {}, min(self.tensor_maps, key=lambda pointer: pointer.place, default=None)
        for i, name in enumerate(parameters):
            argument = self._load(self._load(Pointer(self.launched[_PARAMETERS].of, i)), otherwise=first_map)
            is_array = argument.of.startswith("array ")
            values[name] = self._array(argument).base + argument.place if is_array else PARAMETER_BASE
        maps = {PARAMETER_BASE + pointer.place: tensor_map for pointer, tensor_map in self.tensor_maps.items()}
        return Launch(grid[0], block[0], self.launched[_SHARED_BYTES], values, maps)

    def _execute(self, statement: str) -> None:
        found = _STATEMENT.fullmatch(statement)
        if found is None or (found[2] not in _OPERATIONS):
            raise NotModelled(f"on the host: {statement[:100]}")
        value = _OPERATIONS[found[2]](self, found[3].strip())
        if found[1] is not None:
            self.values[found[1]] = value

    def _array(self, pointer: Pointer) -> Array:
        return self.arrays[int(pointer.of.removeprefix("array "))]

    def _load(self, pointer: Pointer, otherwise: Value = None) -> Value:
        if otherwise is None and pointer not in self.memory:
            raise NotModelled(f"on the host: nothing was stored at {pointer}")
        return self.memory.get(pointer, otherwise)

    def read(self, text: str) -> list[Value]:
        """The values that are named in a text."""
        return [self.values[name] for name in _NAME.findall(text)]


def _constant(host: Host, rest: str) -> Value:
    found = re.match(r"\((-?\d+)[ :)]", rest)
    if found is None:
        raise NotModelled(f"on the host: constant {rest}")
    return int(found[1])


def _structure(host: Host, rest: str) -> Value:
    return {}


def _insert(host: Host, rest: str) -> Value:
    value, structure = host.read(rest)
    return {**structure, _index(rest): value}


def _extract(host: Host, rest: str) -> Value:
    (structure,) = host.read(rest)
    return structure[_index(rest)]


def _index(rest: str) -> str:
    return rest[rest.index("[") + 1 : rest.index("]")]


def _element(host: Host, rest: str) -> Value:
    """The place of an element: of an array, or of the one structure there is."""
    base, last = host.read(rest)[0], _index(rest).split(",")[-1].strip()
    return Pointer(base.of, base.place + (host.values[last] if last.startswith("%") else int(last)))


def _allocate(host: Host, rest: str) -> Value:
    return Pointer(f"object {len(host.values)}")


def _load(host: Host, rest: str) -> Value:
    """Return the stored value; for the array of tensor maps, its address."""
    (pointer,) = host.read(rest)
    return pointer if "-> !llvm.array" in rest else host.memory[pointer]


def _store(host: Host, rest: str) -> Value:
    value, pointer = host.read(rest)
    host.memory[pointer] = value
    return None


def _add(host: Host, rest: str) -> Value:
    left, right = host.read(rest)
    return Pointer(left.of, left.place + right) if isinstance(left, Pointer) else left + right


def _multiply(host: Host, rest: str) -> Value:
    left, right = host.read(rest)
    return left * right


def _same(host: Host, rest: str) -> Value:
    (value,) = host.read(rest)
    return value


def _return(host: Host, rest: str) -> Value:
    return None


def _call(host: Host, rest: str) -> Value:
    name, arguments = rest.partition("(")[0].strip("@ "), host.read(rest)
    if name == "mosaic_gpu_init_tma_desc":
        _make_tensor_map(host, arguments)
    elif name in ("mosaic_gpu_build_kernel_spec", "mosaic_gpu_launch_kernel"):
        host.launched = arguments
    else:
        raise NotModelled(f"on the host: {rest[:100]}")
    return None


def _make_tensor_map(host: Host, arguments: list[Value]) -> None:
    target, base, item, rank, *lists = arguments
    sizes, strides, box = (
        tuple(host.memory[Pointer(each.of, each.place + i)] for i in range(rank))
        for each in (lists[0], lists[1], lists[3])
    )
    bits = _ITEM_BITS[item]
    if bits < 8:
        sizes, box, strides = packed(sizes), packed(box), in_bytes(strides)
    host.tensor_maps[target] = TensorMap(
        array=host.arrays[int(base.of.removeprefix("array "))],
        start=base.place,
        itemsize=max(bits // 8, 1),
        shape=sizes,
        strides=strides,
        box=box,
        swizzle=lists[2],
        is_packed=bits < 8,
    )


_OPERATIONS: dict[str, Callable[[Host, str], Value]] = {
    "builtin.unrealized_conversion_cast": _same,
    "llvm.add": _add,
    "llvm.alloca": _allocate,
    "llvm.call": _call,
    "llvm.extractvalue": _extract,
    "llvm.getelementptr": _element,
    "llvm.insertvalue": _insert,
    "llvm.inttoptr": _same,
    "llvm.load": _load,
    "llvm.mlir.constant": _constant,
    "llvm.mlir.poison": _structure,
    "llvm.mlir.undef": _structure,
    "llvm.mul": _multiply,
    "llvm.ptrtoint": _same,
    "llvm.return": _return,
    "llvm.store": _store,
    "llvm.trunc": _same,
}
