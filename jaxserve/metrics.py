"""Every metric of the server: one line each in `METRICS`.

Names and buckets follow vLLM's with the prefix `jaxserve:`, so that a dashboard converts by search and
replace; the last block is ours. One registry lives in each API process: engine numbers arrive as
`EngineStats` in one of them, request numbers from its own stream loop. What is shown is the sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from jaxserve.ipc.messages import EngineStats, ModelInfo

PREFIX = "jaxserve:"
BASE_LABELS = ("model_name", "engine")

# fmt: off
LATENCY_S = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TTFT_S = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
TOKEN_LATENCY_S = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
STEP_S = (.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10)
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PREEMPTIONS = (1, 2, 5, 10, 20)
PARAM_N = (1, 2, 5, 10, 20)
TOKENS = tuple(mantissa * 10**exponent for exponent in range(6) for mantissa in (1, 2, 5))
"""1-2-5 series to 500,000."""
# fmt: on


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric. `labels` come on top of `BASE_LABELS`; the exposition adds `_total` to counters."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


# fmt: off
METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("num_requests_running", "gauge", "Requests in the running batch."),
    MetricSpec("num_requests_waiting", "gauge", "Requests waiting to be scheduled."),
    MetricSpec("num_requests_waiting_by_reason", "gauge", "Waiting requests by reason: all wait for capacity.", ("reason",)),
    MetricSpec("kv_cache_usage_perc", "gauge", "Share of KV pages in use; 1 means all."),
    MetricSpec("cache_config_info", "gauge", "KV cache settings as labels.", ("block_size", "num_gpu_blocks", "cache_dtype")),
    MetricSpec("prefix_cache_queries", "counter", "Prompt tokens looked up in the prefix cache."),
    MetricSpec("prefix_cache_hits", "counter", "Prompt tokens found in the prefix cache."),
    MetricSpec("num_preemptions", "counter", "Requests put back to waiting for lack of KV pages."),
    MetricSpec("adapter_requests", "counter", "Requests of each adapter of --lora-modules.", ("adapter",)),
    MetricSpec("prompt_tokens", "counter", "Prompt tokens processed."),
    MetricSpec("prompt_tokens_cached", "counter", "Prompt tokens of requests whose KV came from the prefix cache."),
    MetricSpec("prompt_tokens_by_source", "counter", "Prompt tokens by where their KV came from.", ("source",)),
    MetricSpec("generation_tokens", "counter", "Tokens generated."),
    MetricSpec("forced_tokens", "counter", "Generated tokens that a grammar left no choice about: nobody sampled them."),
    MetricSpec("spec_decode_num_drafts", "counter", "Drafts: guesses at a request's next tokens."),
    MetricSpec("spec_decode_num_draft_tokens", "counter", "Tokens of drafts."),
    MetricSpec("spec_decode_num_accepted_tokens", "counter", "Tokens of drafts that were right."),
    MetricSpec("request_success", "counter", "Finished generations by reason.", ("finished_reason",)),
    MetricSpec("admission_rejections", "counter", "Requests refused by a queue limit.", ("reason",)),
    MetricSpec("time_to_first_token_seconds", "histogram", "Submission to first token.", (), TTFT_S),
    MetricSpec("inter_token_latency_seconds", "histogram", "Time between tokens of a request.", (), TOKEN_LATENCY_S),
    MetricSpec("request_time_per_output_token_seconds", "histogram", "Mean time per output token after the first.", (), TOKEN_LATENCY_S),
    MetricSpec("e2e_request_latency_seconds", "histogram", "Submission to the end of a generation.", (), LATENCY_S),
    MetricSpec("request_queue_time_seconds", "histogram", "Time waiting to be scheduled.", (), LATENCY_S),
    MetricSpec("request_inference_time_seconds", "histogram", "Time from being scheduled to the end.", (), LATENCY_S),
    MetricSpec("request_prefill_time_seconds", "histogram", "Time from being scheduled to the first token.", (), LATENCY_S),
    MetricSpec("request_decode_time_seconds", "histogram", "Time from the first to the last token.", (), LATENCY_S),
    MetricSpec("request_prompt_tokens", "histogram", "Prompt tokens per request.", (), TOKENS),
    MetricSpec("request_generation_tokens", "histogram", "Generated tokens per request.", (), TOKENS),
    MetricSpec("request_max_num_generation_tokens", "histogram", "Most tokens any choice of a request generated.", (), TOKENS),
    MetricSpec("request_params_n", "histogram", "The request's n.", (), PARAM_N),
    MetricSpec("request_params_max_tokens", "histogram", "The request's max_tokens.", (), TOKENS),
    MetricSpec("request_num_preemptions", "histogram", "Preemptions per request.", (), PREEMPTIONS),
    MetricSpec("request_prefill_kv_computed_tokens", "histogram", "Prompt tokens computed, not taken from the cache.", (), TOKENS),
    MetricSpec("iteration_tokens_total", "histogram", "Tokens computed per engine step.", (), ITERATION_TOKENS),

    MetricSpec("compilations", "counter", "Programs compiled; phase `serving` stays 0.", ("phase",)),
    MetricSpec("bucket_steps", "counter", "Steps by program and bucket.", ("kind", "bucket")),
    MetricSpec("program_calls", "counter", "Programs called; fewer than steps where decode steps run as a burst."),
    MetricSpec("padding_tokens", "counter", "Token rows computed but unused.", ("kind",)),
    MetricSpec("device_step_seconds", "histogram", "Device time of a step.", (), STEP_S),
    MetricSpec("host_gap_seconds", "histogram", "Time the device waited for the host between calls, at most.", (), STEP_S),
    MetricSpec("startup_phase_seconds", "gauge", "Wall-clock seconds of each start-up phase; phases overlap, `total` spans all.", ("phase",)),
    MetricSpec("startup_programs", "gauge", "Programs made at start-up by source: cache or compiled.", ("source",)),
    MetricSpec("engine_restarts", "counter", "Times the engine process was started again after its end."),
    MetricSpec("client_disconnects", "counter", "Requests whose client left before the end."),
    MetricSpec("surplus_connections", "counter", "Connections beyond --max-connections: answered 503, or closed."),
    MetricSpec("http_requests", "counter", "HTTP requests by route and status.", ("route", "status")),
)
# fmt: on

_ENGINE_LEVELS: tuple[tuple[str, dict[str, str]], ...] = (
    ("num_requests_running", {}),
    ("num_requests_waiting", {}),
    ("num_requests_waiting_by_reason", {"reason": "capacity"}),
    ("kv_cache_usage_perc", {}),
)
"""Gauges that are 0 of an engine that is gone."""
_ENGINE_FACTS = ("cache_config_info", "startup_phase_seconds", "startup_programs")
"""Gauges that say nothing before the next one is ready."""
_LARGEST = (
    PREFIX + "startup_phase_seconds",
    PREFIX + "startup_programs",
    PREFIX + "cache_config_info",
    "process_max_fds",
)
"""Gauges that say the same in every API process, or nothing yet."""
_EARLIEST = "process_start_time_seconds"
_CREATED_SUFFIX = "_created"

_KINDS = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}


class FamilySnapshot(msgspec.Struct, frozen=True, array_like=True):
    """One metric with its samples: (name, labels, value)."""

    name: str
    help: str
    kind: str
    samples: list[tuple[str, dict[str, str], float]]


class _Merged(Collector):
    """The metrics of several API processes as those of one."""

    def __init__(self, snapshots: Sequence[Iterable[FamilySnapshot]]) -> None:
        self._snapshots = snapshots

    def collect(self) -> Iterator[Metric]:
        families: dict[str, FamilySnapshot] = {}
        totals: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for snapshot in self._snapshots:
            for family in snapshot:
                families.setdefault(family.name, family)
                samples = totals.setdefault(family.name, {})
                for name, labels, value in family.samples:
                    key = (name, tuple(labels.items()))
                    samples[key] = _together(name, samples[key], value) if key in samples else value
        for name, family in families.items():
            metric = Metric(name, family.help, family.kind)
            for (sample, pairs), value in totals[name].items():
                metric.add_sample(sample, dict(pairs), value)
            yield metric


def _together(name: str, one: float, other: float) -> float:
    if name.endswith(_CREATED_SUFFIX) or name == _EARLIEST:
        return min(one, other)
    return max(one, other) if name in _LARGEST else one + other


def exposition(*snapshots: Iterable[FamilySnapshot]) -> bytes:
    """The Prometheus text format of the sums over API processes."""
    return generate_latest(_Merged(snapshots))


class Metrics:
    """The registry and its metrics, addressed by the names of `METRICS`."""

    def __init__(self, model_name: str, engine: str = "0") -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._base = {"model_name": model_name, "engine": engine}
        self._families: dict[str, Counter | Gauge | Histogram] = {}
        self._children: dict[tuple[str, ...], Counter | Gauge | Histogram] = {}
        self._compilations: dict[str, int] = {}
        for spec in METRICS:
            extra = {"buckets": spec.buckets} if spec.buckets else {}
            self._families[spec.name] = _KINDS[spec.kind](
                PREFIX + spec.name, spec.help, BASE_LABELS + spec.labels, registry=self.registry, **extra
            )
            if not spec.labels:
                self._child(spec.name)
        for phase in ("warmup", "serving"):
            self._child("compilations", phase=phase)
        for reason in ("stop", "length", "abort", "error"):
            self._child("request_success", finished_reason=reason)

    def inc(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter."""
        child = self._child(name, **labels)
        assert isinstance(child, Counter), f"{name} is not a counter"
        child.inc(amount)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        child = self._child(name, **labels)
        assert isinstance(child, Gauge), f"{name} is not a gauge"
        child.set(value)

    def observe(self, name: str, value: float) -> None:
        """Add one observation to a histogram."""
        child = self._child(name)
        assert isinstance(child, Histogram), f"{name} is not a histogram"
        child.observe(value)

    def record_ready(self, model_info: ModelInfo) -> None:
        """Take over what the engine says once it is ready."""
        self.set(
            "cache_config_info",
            1,
            block_size=str(model_info.block_size),
            num_gpu_blocks=str(model_info.num_kv_blocks),
            cache_dtype=model_info.kv_dtype,
        )

    def record_stats(self, stats: EngineStats) -> None:
        """Take over one `EngineStats`: gauges as they are, counters as increments."""
        self.set("num_requests_running", stats.num_running)
        self.set("num_requests_waiting", stats.num_waiting)
        self.set("num_requests_waiting_by_reason", stats.num_waiting, reason="capacity")
        self.set("kv_cache_usage_perc", stats.kv_cache_usage)
        for name, amount in (
            ("prefix_cache_queries", stats.prefix_cache_queries),
            ("prefix_cache_hits", stats.prefix_cache_hits),
            ("num_preemptions", stats.num_preemptions),
            ("prompt_tokens", stats.num_prompt_tokens),
            ("generation_tokens", stats.num_generation_tokens),
            ("forced_tokens", stats.num_jump_forward_tokens),
            ("spec_decode_num_drafts", stats.num_drafts),
            ("spec_decode_num_draft_tokens", stats.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", stats.num_accepted_tokens),
            ("program_calls", stats.num_calls),
        ):
            if amount:
                self.inc(name, amount)
        for program, steps in stats.bucket_steps.items():
            kind, _, bucket = program.partition("/")
            self.inc("bucket_steps", steps, kind=kind, bucket=bucket)
        for kind, tokens in stats.padding_tokens.items():
            self.inc("padding_tokens", tokens, kind=kind)
        for tokens in stats.step_tokens:
            self.observe("iteration_tokens_total", tokens)
        for seconds in stats.device_step_seconds:
            self.observe("device_step_seconds", seconds)
        for seconds in stats.host_gap_seconds:
            self.observe("host_gap_seconds", seconds)
        for phase, total in stats.compilations.items():
            self.inc("compilations", total - self._compilations.get(phase, 0), phase=phase)
            self._compilations[phase] = total

    def forget_engine(self) -> None:
        """Its gauges went with it; counters go on from where they are, also those that an engine tells as totals."""
        for name, labels in _ENGINE_LEVELS:
            self.set(name, 0, **labels)
        for name in _ENGINE_FACTS:
            self._families[name].clear()
        self._children = {key: child for key, child in self._children.items() if key[0] not in _ENGINE_FACTS}
        self._compilations = {}

    def snapshot(self) -> list[FamilySnapshot]:
        """All samples as they are now."""
        return [
            FamilySnapshot(
                family.name,
                family.documentation,
                family.type,
                [(sample.name, sample.labels, sample.value) for sample in family.samples],
            )
            for family in self.registry.collect()
        ]

    def value(self, name: str, **labels: str) -> float:
        """The current value of a counter or gauge, or the number of observations of a histogram."""
        suffix = {Counter: "_total", Gauge: "", Histogram: "_count"}[type(self._families[name])]
        return self.registry.get_sample_value(PREFIX + name + suffix, self._base | labels) or 0.0

    def _child(self, name: str, **labels: str) -> Counter | Gauge | Histogram:
        key = (name, *labels.values())
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._families[name].labels(**self._base, **labels)
        return child
