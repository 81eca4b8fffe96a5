"""`python -m benchmarks.model_steps h200 8 qwen3.6-35b decode`: one row of docs/benchmarks/model-steps.md, and the largest launches."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from jaxserve.tools.planning.targets import TPU_ENVIRONMENT


def main() -> int:
    """Compile one step, and print what it moves."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model_steps", description=__doc__)
    parser.add_argument("device")
    parser.add_argument("num_devices", type=int)
    parser.add_argument("model")
    parser.add_argument("kind", choices=("decode", "mixed"))
    parser.add_argument("--data-parallel-size", type=int, default=1, help="groups of devices that divide the requests")
    parser.add_argument("--largest", type=int, default=0, help="launches of each layer to list")
    parser.add_argument("--text", type=Path, help="write the compiled program here")
    arguments = parser.parse_args()
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        parser.error("set JAX_PLATFORMS=cpu: nothing runs, and no device may be asked")
    os.environ.update(TPU_ENVIRONMENT)
    from benchmarks.model_steps.newer_shapes import NEWER_MODELS  # they import jax
    from benchmarks.model_steps.shapes import MODELS
    from benchmarks.model_steps.steps import make_case
    from jaxserve.tools.planning.devices import ACCELERATORS

    model, num_devices = (MODELS | NEWER_MODELS)[arguments.model], arguments.num_devices
    case = make_case(model, ACCELERATORS[arguments.device], num_devices, arguments.kind, arguments.data_parallel_size)
    step = case.step(*case.compile())
    if arguments.text is not None:
        arguments.text.write_text(step.text, encoding="utf-8")
    layers = [f"{layer.moved_bytes / 1e6:.0f} of {layer.ideal_bytes / 1e6:.0f} MB" for layer in step.layers]
    graphs = ", ".join(step.outside_graphs) or "none"
    print(
        f"| {model.title} | {num_devices} {arguments.device} | {arguments.kind} | {'; '.join(layers)} | "
        f"{step.ratio:.2f} | {step.num_loops} | {graphs} |"
    )
    for layer in step.layers:
        largest = sorted(layer.launches, key=lambda launch: -launch.moved_bytes)[: arguments.largest]
        for each in largest:
            print(f"{each.read_bytes / 1e6:9.2f} {each.written_bytes / 1e6:9.2f}  {each.name:44s} {each.scope[:110]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
