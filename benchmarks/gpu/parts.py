"""The parts of a run, in order, and how long each may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Part:
    """A module with `run(context)`, in a process of its own."""

    name: str
    budget_s: float
    """Seconds; what the parts before it did not use comes on top."""
    title: str
    is_check: bool = False
    """True if the run fails when this part fails."""
    is_default: bool = True
    """True if the part runs by default."""
    attempt_s: float | None = None
    """Most seconds of one attempt, after which the part goes on without it in another process; None: all there are."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """More variables of its process; XLA_FLAGS are added to those of all parts."""
    own_module: str | None = None
    """Module to run; None: the one of the part's name in this package."""

    @property
    def module(self) -> str:
        return self.own_module or f"benchmarks.gpu.{self.name}"


_NO_AUTOTUNING = {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}
"""Tiny models have hundreds of matmuls to tune, in float32 for more than a minute, and nothing is timed."""
_UPDATE_MODE = "--xla_gpu_command_buffer_update_mode"
_UPDATES = "benchmarks.gpu.graph_updates"
_UPDATE_LOG = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "command_buffer_thunk=3"}
_GRAPH_LOG = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "command_buffer_thunk=5,gpu_command_buffer=3"}

PARTS = (
    Part("machine", 42, "versions, and the bounds of the device", attempt_s=40),
    Part("kernels", 65, "every op against numpy in float64", is_check=True),
    Part(
        "models",
        70,
        "tiny models: against the CPU, and alone against in a batch",
        is_check=True,
        environment=_NO_AUTOTUNING,
    ),
    Part("attention", 55, "attention and KV writes alone", attempt_s=12),
    Part("matmuls", 20, "matmuls of few tokens", attempt_s=12),
    Part("engine", 110, "steps of a random Llama-3.1-8B, bfloat16"),
    Part("int8", 35, "decode steps with smaller weights, or a smaller KV cache"),
    Part("server", 90, "start-up and HTTP, random Llama-3.2-1B shape"),
    Part("graphs", 15, "CUDA graphs: records, updates and addresses", environment=_GRAPH_LOG),
    Part("references", 15, "attention by XLA and cuDNN alone", attempt_s=15),
    Part("peers", 20, "torch and transformers on the same device"),
    Part(
        "graph_updates",
        60,
        "steps of a small model: graphs are updated as needed",
        is_default=False,
        own_module=_UPDATES,
        environment=_UPDATE_LOG,
    ),
    Part(
        "graph_updates_skip_temp",
        60,
        "the same, with temporary buffers at fixed addresses",
        is_default=False,
        own_module=_UPDATES,
        environment={"XLA_FLAGS": f"{_UPDATE_MODE}=SKIP_TEMP", **_UPDATE_LOG},
    ),
    Part(
        "graph_updates_skip_profiled",
        60,
        "the same, with all buffers at fixed addresses that had one at first",
        is_default=False,
        own_module=_UPDATES,
        environment={"XLA_FLAGS": f"{_UPDATE_MODE}=SKIP_PROFILED", **_UPDATE_LOG},
    ),
    Part(
        "graph_updates_none",
        60,
        "the same, without CUDA graphs",
        is_default=False,
        own_module=_UPDATES,
        environment={"XLA_FLAGS": "--xla_gpu_enable_command_buffer=", **_UPDATE_LOG},
    ),
    Part("profile", 240, "where the time of a step goes", is_default=False),
    Part("attention_mma", 90, "attention alone, by the kernel on mma.sync", is_default=False, attempt_s=12),
    Part("latents", 90, "attention over latent vectors (MLA) alone", is_default=False, attempt_s=30),
    Part(
        "states", 90, "recurrent states alone: decode steps, and prompts by both forms", is_default=False, attempt_s=30
    ),
    Part("tune", 240, "block sizes of our attention kernels", is_default=False),
    Part("tune_matmuls", 240, "where our kernel for matmuls is faster", is_default=False),
    Part("tune_groups", 120, "sizes of our kernel for weights in groups", is_default=False),
)
"""Parts of the check; those that run by default take less than nine minutes together."""


def total_budget_s() -> float:
    return sum(part.budget_s for part in PARTS if part.is_default)
