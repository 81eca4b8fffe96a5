"""Plain names shared by every package. No imports from jaxserve, no jax."""

from __future__ import annotations

from typing import Final, Literal, NewType

RequestId = NewType("RequestId", str)
"""Unique per generated sequence; `n=3` makes three of them."""

BlockId = NewType("BlockId", int)
"""Index of a page in the KV pool. Block 0 is the null block: padding writes land there."""

BlockHash = NewType("BlockHash", bytes)
"""sha256 over (parent hash, tokens of the block, salt): names a block's content and its whole past."""

FinishReason = Literal["stop", "length", "abort", "error"]
ProgramKind = Literal[
    "decode",
    "mixed",
    "speculate",
    "embed",
    "encode",
    "encode_start",
    "encode_heads",
    "encode_tile",
    "encode_window_tile",
    "encode_layer_heads",
    "encode_layer",
    "encode_window_layer",
    "encode_deepstack",
    "encode_end",
    "prompt_embeds",
]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
"""Log-probabilities of the model itself, or of the distribution that tokens are drawn from."""
LabelActivation = Literal["none", "sigmoid", "softmax"]
"""Function from the logits of labels to scores or probabilities: none, of each label alone, or of all together."""
Pooling = Literal["last", "mean", "cls"]
"""Pooling of token vectors into the vector of a text: the last one, the mean, or the first one."""

NULL_BLOCK = BlockId(0)
MAX_TOP_LOGPROBS = 20
NO_LOGPROBS = -1
"""Used instead of a number of log-probabilities: not even the chosen token's is requested."""
MAX_LOGIT_BIAS = 1024
"""Largest number of biased tokens per request."""
MAX_BAD_WORDS = 256
"""Largest number of forbidden token sequences per request."""
MAX_BAD_WORD_TOKENS = 16
"""Largest number of tokens of a forbidden sequence."""

GPU_SHARE: Final = 0.95
"""Fraction of a GPU's memory that JAX preallocates in the engine, unless XLA_PYTHON_CLIENT_MEM_FRACTION is set. The rest is for
the CUDA context, its libraries and other processes."""
ACCELERATOR_FILES: Final = ("nvidia[0-9]*", "accel[0-9]*", "vfio/[0-9]*")
"""Files of GPUs and TPUs in /dev, as patterns."""
PRELOAD_FLAG: Final = "--preload"
"""Argument of the engine process: import what a real model needs before the specification arrives."""

ADAPTER_PLACES: Final = 1 << 16
"""An adapter's number is its place, from 1, plus this number times the earlier adapters of that place. 0: no adapter."""


def place_of(adapter: int) -> int:
    """Return the place of an adapter's matrices among those of all adapters, from 1; 0 for none."""
    return adapter % ADAPTER_PLACES


def expert_dtype(num_experts: int) -> Literal["uint8", "uint16"]:
    """Return the smallest type of the numbers of so many experts."""
    return "uint8" if num_experts <= 256 else "uint16"
