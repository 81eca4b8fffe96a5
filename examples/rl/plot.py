"""Draw the log of `reinforce.py`: reward and divergence per step.

python examples/rl/plot.py run.jsonl run.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt


def main() -> None:
    log, picture = sys.argv[1:]
    records = [json.loads(line) for line in Path(log).read_text("utf-8").splitlines()]
    steps = [record["step"] for record in records]
    is_apart = any(record["divergence_max"] for record in records)
    heights = (1, 1) if is_apart else (4, 1)
    figure, (above, below) = plt.subplots(
        2, 1, sharex=True, figsize=(7, 5), height_ratios=heights, layout="constrained"
    )
    above.plot(steps, [record["reward"] for record in records], color="tab:blue")
    above.set_ylabel('reward: share of "e"')
    above.set_ylim(bottom=0)
    for name, style in (("max", "-"), ("mean", "--")):
        below.plot(steps, [record[f"divergence_{name}"] for record in records], style, color="tab:red", label=name)
    below.set_ylabel("|trainer - server|,\nnats per token")
    below.set_xlabel("step")
    if is_apart:
        below.set_yscale("log")
        below.legend()
    else:
        below.set_yticks([0])
        num_tokens = sum(record["num_tokens"] for record in records)
        below.set_title(f"trainer = server: 0 in each of {num_tokens:,} tokens", fontsize="medium")
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main()
