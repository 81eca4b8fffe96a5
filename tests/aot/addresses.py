"""Operands of the kernels of Mosaic GPU in compiled programs: whole arrays, since not every address will do."""

from __future__ import annotations

import re


def kernels_given_parts(text: str) -> list[str]:
    """Return the fusions of a compiled program in which a kernel gets a part of an array, in place, as an operand.

    Its address need not be a multiple of 256 bytes, and then the kernel fails when it runs.
    """
    computations = re.findall(r"^%(\S+) \(.*?\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    return [
        name
        for name, body in computations
        if 'custom_call_target="mosaic_gpu' in body and re.search(r"= \S+ (dynamic-)?slice\(", body)
    ]
