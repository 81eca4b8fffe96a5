"""jaxserve: a JAX-native LLM inference server for TPU, GPU and CPU.

The Python API is here: `from jaxserve import LLM, SamplingParams`. Its modules are imported when a name is
asked for, so that `import jaxserve` alone costs nothing; jax is never imported in the caller's process.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.llm.llm import LLM
    from jaxserve.llm.results import (
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
        ToolCall,
    )
    from jaxserve.llm.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "ToolCall",
    "__version__",
]

_HOMES = {
    "LLM": "llm",
    "SamplingParams": "sampling_params",
    "ClassificationOutput": "results",
    "ClassificationRequestOutput": "results",
    "CompletionOutput": "results",
    "EmbeddingOutput": "results",
    "EmbeddingRequestOutput": "results",
    "Logprob": "results",
    "RequestOutput": "results",
    "ScoringOutput": "results",
    "ScoringRequestOutput": "results",
    "ToolCall": "results",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"jaxserve.llm.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
