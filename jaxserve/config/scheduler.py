"""Settings of the scheduler and of speculation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxserve.config.option import option
from jaxserve.errors import ConfigError

SchedulingPolicy = Literal["fair", "fcfs", "priority"]
SpeculativeMethod = Literal["auto", "mtp"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Limits on requests and tokens that run together."""

    max_num_seqs: int | None = option(
        None, ge=1, le=4096, help="requests that run at the same time (default: 32 on CPU, 256 on accelerators)"
    )
    max_num_batched_tokens: int | None = option(
        None, ge=1, help="tokens computed in one step (default: 128 on CPU, 2048 on accelerators)"
    )
    max_queued_requests: int = option(1024, ge=0, help="requests that may wait; further ones get 429")
    max_queued_tokens: int = option(4_194_304, ge=1, help="prompt tokens that may wait; requests beyond get 429")
    scheduling_policy: SchedulingPolicy = option(
        "fair",
        help="order of prompts; fcfs: first come, first served, requests with a priority get 400; priority: lowest "
        "`priority` first, then arrival; fair: like priority, but API keys take turns, and half of each step goes to the "
        "shortest prompts",
    )
    overlap: bool = option(True, help="dispatch the next step before the results of the last one are read")
    max_burst_ms: float = option(
        100.0,
        ge=0,
        help="most milliseconds of decode steps in one call (multi-step decode) while no request waits, which a new request "
        "waits for; 0: one step per call",
    )
    num_speculative_tokens: int = option(
        0, ge=0, le=64, help="most draft tokens per request and step, see --speculative-method; 0: none"
    )
    speculative_method: SpeculativeMethod = option(
        "auto",
        help="where draft tokens come from; auto: --speculative-model if it is given, else the request's text; mtp: the "
        "multi-token-prediction layer of the model's checkpoint",
    )
    speculative_model: str | None = option(
        None,
        help="smaller model with the same tokenizer, EAGLE-3 head or DFlash drafter of the model, or drafter of a Gemma 4, that drafts: directory, GGUF file or hub id (default: none)",
    )

    def __post_init__(self) -> None:
        if self.speculative_method == "mtp" and self.speculative_model is not None:
            raise ConfigError(
                f"--speculative-method mtp: not with --speculative-model {self.speculative_model}; one of them drafts"
            )
        if self.drafter is not None and not self.num_speculative_tokens:
            start = 1 if self.speculative_method == "mtp" else 3
            raise ConfigError(
                f"{self.drafter}: set --num-speculative-tokens, the tokens of a draft; {start} is a good start"
            )

    @property
    def drafter(self) -> str | None:
        """Flag that chooses what drafts on the device: a draft model or a multi-token-prediction layer; None if nothing does."""
        if self.speculative_method == "mtp":
            return "--speculative-method mtp"
        return None if self.speculative_model is None else f"--speculative-model {self.speculative_model}"

    @property
    def has_drafter(self) -> bool:
        """True if a draft model or a multi-token-prediction layer drafts on the device."""
        return self.drafter is not None

    @property
    def has_priorities(self) -> bool:
        """True if requests may have a priority."""
        return self.scheduling_policy != "fcfs"
