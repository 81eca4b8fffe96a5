"""For which matmuls our kernel is faster than XLA on this device: writes `tuning/matmul-h200.json` into the results.

Not part of a run unless it is asked for: the file is looked at before it replaces
`jaxserve_kernels/matmul/tuning/h200.json`. What was not measured in time stays as it is there.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from jaxserve_kernels.matmul import tuning
from jaxserve_kernels.matmul.gpu import adds_e4m3
from jaxserve_kernels.matmul.tuning import TOKENS, SkinnyTuning

from benchmarks.gpu.backends import why_no_kernels
from benchmarks.gpu.context import Context
from benchmarks.gpu.device import first_device
from benchmarks.gpu.matmul_programs import Chain, Shapes, candidates, cells
from benchmarks.gpu.matmuls import MatmulBench
from benchmarks.gpu.shapes import LLAMA_8B, decoder

DEVICE = "h200"
WEIGHTS = ("int8", "float8_e4m3fn")
"""Each with activations as they are, and quantised."""
WORTH = 0.97
"""Fraction of XLA's time below which a kernel counts as faster: smaller gains may be noise."""
COMPILE_SHARES = {"int8": 0.3, "float8_e4m3fn": 0.6}
"""Fraction of the remaining time for compiling a sweep."""


def run(context: Context) -> None:
    first_device(context)
    config = decoder(LLAMA_8B)
    reason = why_no_kernels(config)
    if reason is not None:
        context.recorder.note(f"there is nothing to tune: {reason}")
        return
    known, bench = copy.deepcopy(tuning.load(DEVICE)), MatmulBench(context)
    for weights in WEIGHTS:
        chains = {
            (name, count, is_dynamic): compared(shapes, weights, count, is_dynamic=is_dynamic)
            for (name, shapes), count, is_dynamic in itertools.product(cells(config).items(), TOKENS, (False, True))
        }
        bench.compile([each for found in chains.values() for each in found], COMPILE_SHARES[weights])
        for (name, count, _), found in chains.items():
            context.recorder.attempt(
                f"{name}, {count} tokens, {found[0].types}", partial(_tune, bench, name, found, known)
            )
            _write(context, known)


def compared(shapes: Shapes, weights: str, count: int, *, is_dynamic: bool) -> list[Chain]:
    """XLA's matmul, then our kernel's with all sizes."""
    plain = Chain(shapes, weights, count, is_dynamic=is_dynamic)
    sizes = candidates(count, shapes)
    if is_dynamic and weights == "float8_e4m3fn":
        sizes = [each for each in sizes if adds_e4m3(count, each)]
    return [plain, *(replace(plain, tuning=each) for each in sizes)]


def _tune(bench: MatmulBench, name: str, chains: list[Chain], known: dict[str, Any]) -> None:
    seconds = {chain.tuning: time_s for chain, time_s in bench.compare(name, chains).items()}
    if None in seconds and len(seconds) > 1:
        remember(known, chains[0], choice(seconds))


def choice(seconds: Mapping[SkinnyTuning | None, float]) -> SkinnyTuning | None:
    """The fastest sizes, if they are well ahead of XLA's matmul, which stands under None."""
    best = min((sizes for sizes in seconds if sizes is not None), key=lambda sizes: seconds[sizes])
    return best if seconds[best] < WORTH * seconds[None] else None


def remember(known: dict[str, Any], chain: Chain, chosen: SkinnyTuning | None) -> None:
    """Write the choice into the classes of the chain's matmuls, over what stood there."""
    of_tokens = known.setdefault(chain.types, {}).setdefault(str(chain.num_tokens), {})
    for rows, columns in chain.shapes:
        size = tuning.size_class(rows * columns)
        of_tokens.pop(size, None)
        if chosen is not None:
            of_tokens[size] = asdict(chosen)


def _write(context: Context, known: Mapping[str, Any]) -> None:
    """After every choice, so that a run broken off leaves what it had found."""
    folder = context.results / "tuning"
    folder.mkdir(exist_ok=True)
    (folder / f"matmul-{DEVICE}.json").write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
