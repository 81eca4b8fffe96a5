"""`python -m benchmarks.peers.hybrid OUT`: write a model of Qwen3.5's shape with random weights, for `--model OUT`.

Three of four layers are gated delta nets, as in Qwen3.5. It has 162 million parameters and a tokenizer of bytes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.checkpoint import write_checkpoint

NUM_LAYERS = 16
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "vocab_size": 32768,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": NUM_LAYERS,
    "layer_types": ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(NUM_LAYERS)],
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": True,
}


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.hybrid", description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="a folder to be made")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: 0)")
    arguments = parser.parse_args(words)
    if arguments.out.exists():
        print(f"{arguments.out} exists", file=sys.stderr)
        return 2
    size = write_checkpoint(arguments.out, CONFIG, arguments.seed)
    print(f"{arguments.out}: {size / 2e6:.0f} million parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
