"""The metrics of the engine: one field of `EngineStats` each.

A field declares its metric: name, value before anything is counted, kind, help text and labels. The engine counts on
the field (`stats.prompt_tokens += 5`), the struct crosses to an API process, and `metrics.Metrics` publishes every field
under its name with the prefix `jaxserve:`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal, get_type_hints

import msgspec

_STEP_S: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_STEP_TOKENS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True)
class MetricSpec:
    kind: Literal["counter", "gauge", "histogram"]
    """The exposition adds `_total` to the name of a counter."""
    help: str
    labels: tuple[str, ...] = ()
    """Added to the labels that every metric has."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets."""
    is_total: bool = False
    """True if the engine reports a counter's total instead of its increment."""


class EngineStats(msgspec.Struct, array_like=True):
    """Gauges as they are now; increments of counters and observations of histograms since the last report.

    A metric with labels is a dict from the labels' values, joined by `/`, to the number.
    """

    # fmt: off
    num_requests_running: Annotated[int, MetricSpec("gauge", "Requests in the running batch.")] = 0
    num_requests_waiting: Annotated[int, MetricSpec("gauge", "Requests waiting to be scheduled.")] = 0
    num_requests_waiting_by_reason: Annotated[dict[str, int], MetricSpec("gauge", "Waiting requests by reason: capacity, or deferred until their KV pages are fetched or their grammar is compiled.", ("reason",))] = {}
    kv_cache_usage_perc: Annotated[float, MetricSpec("gauge", "Share of KV pages in use; 1 means all.")] = 0.0
    prefix_cache_queries: Annotated[int, MetricSpec("counter", "Prompt tokens looked up in the prefix cache.")] = 0
    prefix_cache_hits: Annotated[int, MetricSpec("counter", "Prompt tokens found in the prefix cache.")] = 0
    image_cache_usage_perc: Annotated[float, MetricSpec("gauge", "Share of image embeddings on the device that running requests hold; 1 means all.")] = 0.0
    image_cache_queries: Annotated[int, MetricSpec("counter", "Images, or tiles of them, looked up among the embeddings on the device.")] = 0
    image_cache_hits: Annotated[int, MetricSpec("counter", "Images, or tiles of them, whose embeddings were there.")] = 0
    num_preemptions: Annotated[int, MetricSpec("counter", "Requests put back to waiting, for lack of KV pages or for new weights.")] = 0
    prompt_tokens: Annotated[int, MetricSpec("counter", "Tokens of prompts, cached ones too, counted with the first token of the reply as in vLLM: a long prompt is a jump. `iteration_tokens_total` grows with each of its chunks.")] = 0
    generation_tokens: Annotated[int, MetricSpec("counter", "Tokens generated.")] = 0
    forced_tokens: Annotated[int, MetricSpec("counter", "Generated tokens that a grammar determined (jump-forward): they were not sampled.")] = 0
    spec_decode_num_drafts: Annotated[int, MetricSpec("counter", "Drafts: guesses at a request's next tokens.")] = 0
    spec_decode_num_draft_tokens: Annotated[int, MetricSpec("counter", "Tokens of drafts.")] = 0
    spec_decode_num_accepted_tokens: Annotated[int, MetricSpec("counter", "Tokens of drafts that were right.")] = 0
    spec_decode_is_on: Annotated[int, MetricSpec("gauge", "1 while steps with drafts of the draft model, EAGLE-3 head, MTP layer, DFlash drafter or drafter of Gemma 4, or of prompt lookup for a model with recurrent states, yield more tokens a second than steps without, as measured; 0 while they do not, and in other engines.")] = 0
    iteration_tokens_total: Annotated[list[int], MetricSpec("histogram", "Tokens computed per engine step.", (), _STEP_TOKENS)] = []
    compilations: Annotated[dict[str, int], MetricSpec("counter", "Programs compiled; phase `serving` stays 0.", ("phase",), is_total=True)] = {}
    late_programs: Annotated[int, MetricSpec("gauge", "Programs that are still loaded or compiled beside requests after the start; larger ones do their steps meanwhile.")] = 0
    bucket_steps: Annotated[dict[str, int], MetricSpec("counter", "Steps by program and bucket.", ("kind", "bucket"))] = {}
    program_calls: Annotated[int, MetricSpec("counter", "Programs called; fewer than steps if one call does several decode steps.")] = 0
    padding_tokens: Annotated[dict[str, int], MetricSpec("counter", "Token rows computed but unused.", ("kind",))] = {}
    device_step_seconds: Annotated[list[float], MetricSpec("histogram", "Device time of a step.", (), _STEP_S)] = []
    host_gap_seconds: Annotated[list[float], MetricSpec("histogram", "Time the device waited for the host between calls, at most.", (), _STEP_S)] = []
    host_up: Annotated[dict[str, int], MetricSpec("gauge", "1 for every host of the engine that gives signs of life.", ("host",))] = {}
    host_steps: Annotated[dict[str, int], MetricSpec("counter", "Steps submitted to the devices of a host.", ("host",), is_total=True)] = {}
    host_memory_bytes: Annotated[dict[str, int], MetricSpec("gauge", "Bytes in use on a host's devices; on CPUs, by its process.", ("host",))] = {}
    host_broadcast_bytes: Annotated[int, MetricSpec("counter", "Bytes of step plans sent to other hosts.")] = 0
    kv_tier_stored_pages: Annotated[dict[str, int], MetricSpec("counter", "KV pages copied to a tier.", ("tier",))] = {}
    kv_tier_fetched_pages: Annotated[dict[str, int], MetricSpec("counter", "KV pages brought back to the device, by tier (hits).", ("tier",))] = {}
    kv_tier_evicted_pages: Annotated[dict[str, int], MetricSpec("counter", "KV pages that a tier dropped for newer ones.", ("tier",))] = {}
    kv_tier_snapshots: Annotated[dict[str, int], MetricSpec("counter", "Snapshots of recurrent states that were copied to a tier (stored), brought back to the device (fetched) or dropped for others (evicted).", ("tier", "event"))] = {}
    kv_tier_bytes: Annotated[dict[str, int], MetricSpec("counter", "Bytes of KV pages and snapshots to (in) and from (out) a tier.", ("tier", "direction"))] = {}
    kv_tier_failures: Annotated[dict[str, int], MetricSpec("counter", "Copies and fetches of KV pages that failed, by reason; the pages are computed.", ("reason",))] = {}
    kv_fetch_seconds: Annotated[list[float], MetricSpec("histogram", "Time from the begin of a fetch of KV pages to its end.", (), _STEP_S)] = []
    kv_fetches_skipped: Annotated[int, MetricSpec("counter", "Prefixes in a tier that were computed because that is faster.")] = 0
    failed_steps: Annotated[dict[str, int], MetricSpec("counter", "Steps that failed on the device, by reason: error, or memory (out of memory). Their requests are computed again; one that fails alone ends.", ("reason",))] = {}
    grammar_seconds: Annotated[list[float], MetricSpec("histogram", "Time from the arrival of a request with a grammar until its first mask is ready.", (), _STEP_S)] = []
    kv_cache_evictions: Annotated[int, MetricSpec("counter", "Cached KV pages given up for other requests.", is_total=True)] = 0
    device_memory_bytes: Annotated[dict[str, int], MetricSpec("gauge", "Bytes in use on each device of the engine's host; none for CPUs.", ("device",))] = {}
    engine_memory_bytes: Annotated[int, MetricSpec("gauge", "Resident memory of the engine's process.")] = 0
    engine_cpu_seconds: Annotated[float, MetricSpec("counter", "Processor time of the engine's process, of all its threads.", is_total=True)] = 0.0
    # fmt: on

    @property
    def num_steps(self) -> int:
        return sum(self.bucket_steps.values())


def _declared() -> dict[str, MetricSpec]:
    hints = get_type_hints(EngineStats, include_extras=True)
    return {name: hints[name].__metadata__[0] for name in EngineStats.__struct_fields__}


ENGINE_METRICS: Final = _declared()
"""The metrics that the engine counts, by name."""
