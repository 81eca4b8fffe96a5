"""Times of one choice, and its metrics."""

from __future__ import annotations

import time

from jaxserve.ipc.messages import AddRequest, RequestOutput
from jaxserve.metrics import Metrics


class ChoiceTimes:
    """Times from the encoded prompt to the last token, in seconds of the monotonic clock."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.submitted_s = time.monotonic()
        self.first_token_s: float | None = None
        self.last_token_s = self.submitted_s
        self.queue_s: float | None = None
        """Time from arrival in the engine to the first step."""

    def record_tokens(self, output: RequestOutput) -> None:
        """Record the arrival of an output."""
        if not output.token_ids:
            return
        now = time.monotonic()
        if self.first_token_s is None:
            self.first_token_s = now
            self.queue_s = output.queue_seconds
            self._metrics.observe("time_to_first_token_seconds", now - self.submitted_s)
        else:
            self._metrics.observe("inter_token_latency_seconds", (now - self.last_token_s) / len(output.token_ids))
        self.last_token_s = now

    def abandon(self) -> None:
        """Count a choice whose client left before its end."""
        self._metrics.inc("request_success", finished_reason="abort")

    def record_end(self, output: RequestOutput, reason: str, request: AddRequest, *, num_tokens: int) -> None:
        """Record the last output of a choice with `num_tokens` generated tokens."""
        metrics, now = self._metrics, time.monotonic()
        num_prompt, num_cached = len(request.prompt_token_ids), output.num_cached_tokens
        metrics.inc("request_success", finished_reason=reason)
        metrics.observe("e2e_request_latency_seconds", now - self.submitted_s)
        metrics.observe("request_prompt_tokens", num_prompt)
        metrics.observe("request_generation_tokens", num_tokens)
        metrics.observe("request_params_max_tokens", request.sampling.max_tokens)
        metrics.observe("request_num_preemptions", output.num_preemptions)
        metrics.inc("prompt_tokens_cached", num_cached)
        if self.first_token_s is None:
            return
        num_computed = num_prompt - num_cached
        metrics.inc("prompt_tokens_by_source", num_computed, source="local_compute")
        metrics.inc("prompt_tokens_by_source", num_cached, source="local_cache_hit")
        decode_s = self.last_token_s - self.first_token_s
        metrics.observe("request_decode_time_seconds", decode_s)
        metrics.observe("request_prefill_kv_computed_tokens", num_computed)
        if num_tokens > 1:
            metrics.observe("request_time_per_output_token_seconds", decode_s / (num_tokens - 1))
        if self.queue_s is not None:
            prefill_s = max(0.0, self.first_token_s - self.submitted_s - self.queue_s)
            metrics.observe("request_queue_time_seconds", self.queue_s)
            metrics.observe("request_prefill_time_seconds", prefill_s)
            metrics.observe("request_inference_time_seconds", prefill_s + decode_s)
