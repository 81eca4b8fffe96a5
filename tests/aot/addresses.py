"""Operands of the kernels of Mosaic GPU in compiled programs: whole arrays, since not every address will do."""

from __future__ import annotations

import re

_SLICE = r"= \S+ ((?:dynamic-)?slice\(.*)"


def kernels_given_parts(text: str) -> list[str]:
    """Return the fusions of a compiled program in which a kernel gets a part of an array, in place, as an operand.

    Its address need not be a multiple of 256 bytes, and then the kernel fails when it runs. The first part of an array has the
    address of the array.
    """
    computations = re.findall(r"^%(\S+) \(.*?\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    return [
        name
        for name, body in computations
        if 'custom_call_target="mosaic_gpu' in body and any(map(_is_inside, re.findall(_SLICE, body)))
    ]


def _is_inside(instruction: str) -> bool:
    """Return True if a slice may begin after the first number of its array."""
    starts = re.search(r"slice=\{(.*?)\}", instruction)
    return starts is None or any(start != "0" for start in re.findall(r"\[(\d+):", starts[1]))
