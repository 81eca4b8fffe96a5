"""Plain names shared by every room. Imports nothing of ours and no jax."""

from __future__ import annotations

from typing import Final, Literal, NewType

RequestId = NewType("RequestId", str)
"""Unique per generated sequence; `n=3` makes three of them."""

BlockId = NewType("BlockId", int)
"""Index of a page in the KV pool. Block 0 is the null block: padding writes land there."""

BlockHash = NewType("BlockHash", bytes)
"""sha256 over (parent hash, tokens of the block, salt): names a block's content and its whole past."""

FinishReason = Literal["stop", "length", "abort", "error"]
ProgramKind = Literal["decode", "mixed", "embed"]
Pooling = Literal["last", "mean", "cls"]
"""Which of a text's token vectors make the text's: the last one, all on average, or the first one."""

NULL_BLOCK = BlockId(0)
MAX_TOP_LOGPROBS = 20
NO_LOGPROBS = -1
"""In the place of their number: not even that of the chosen token is wanted."""
MAX_LOGIT_BIAS = 1024
"""Tokens of one request that may have a bias."""
MAX_BAD_WORDS = 256
"""Token sequences that one request may forbid."""
MAX_BAD_WORD_TOKENS = 16
"""Tokens of one of them."""

GPU_SHARE: Final = 0.95
"""Of a GPU's memory, what the engine's JAX takes unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise. The rest is for
the CUDA context, its libraries and what others hold."""
PRELOAD_FLAG: Final = "--preload"
"""Argument of the engine process: import what a real model needs before the specification arrives."""
