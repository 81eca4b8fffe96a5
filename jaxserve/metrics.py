"""Every metric of the server: the API processes' in `METRICS`, the engine's in `ipc/stats.py`; one line each.

Names and buckets follow vLLM's with the prefix `jaxserve:`, so that a dashboard converts by search and replace. Each API
process has a registry. One of them receives the engine's numbers as `EngineStats`; each counts its own requests. What
`/metrics` shows is the sum.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from jaxserve import __version__
from jaxserve.ipc.messages import ModelInfo
from jaxserve.ipc.stats import ENGINE_METRICS, EngineStats, MetricSpec

PREFIX = "jaxserve:"
BASE_LABELS = ("model_name", "engine")

# fmt: off
LOOP_LAG_S = (.001, .005, .01, .02, .05, .1, .25, .5, 1, 2.5, 5, 10)
LATENCY_S = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TTFT_S = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
TOKEN_LATENCY_S = (.001, .0025, .005, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
PREEMPTIONS = (1, 2, 5, 10, 20)
PARAM_N = (1, 2, 5, 10, 20)
TOKENS = tuple(mantissa * 10**exponent for exponent in range(6) for mantissa in (1, 2, 5))
"""1-2-5 series to 500,000."""

METRICS: Final[dict[str, MetricSpec]] = ENGINE_METRICS | {
    "cache_config_info": MetricSpec("gauge", "KV cache settings as labels.", ("block_size", "num_gpu_blocks", "cache_dtype")),
    "lora_requests_info": MetricSpec("gauge", "Time at which the loaded adapters last changed, in seconds since 1970; all are in memory, so none waits.", ("max_lora", "running_lora_adapters", "waiting_lora_adapters")),
    "model_token_flops": MetricSpec("gauge", "Operations for one token of the layers' weights, and of the output matrix (head) for each token that is sampled from, on all devices; without attention.", ("part",)),
    "model_step_read_bytes": MetricSpec("gauge", "Bytes of weights that a step reads on one device; without the KV cache."),
    "adapter_requests": MetricSpec("counter", "Requests of each adapter of --lora-modules.", ("adapter",)),
    "prompt_tokens_cached": MetricSpec("counter", "Prompt tokens of requests whose KV came from the prefix cache."),
    "prompt_tokens_by_source": MetricSpec("counter", "Prompt tokens by where their KV came from.", ("source",)),
    "request_success": MetricSpec("counter", "Finished generations by reason.", ("finished_reason",)),
    "admission_rejections": MetricSpec("counter", "Requests refused by a queue limit.", ("reason",)),
    "time_to_first_token_seconds": MetricSpec("histogram", "Submission to first token.", (), TTFT_S),
    "inter_token_latency_seconds": MetricSpec("histogram", "Time between tokens of a request.", (), TOKEN_LATENCY_S),
    "request_time_per_output_token_seconds": MetricSpec("histogram", "Mean time per output token after the first.", (), TOKEN_LATENCY_S),
    "e2e_request_latency_seconds": MetricSpec("histogram", "Submission to the end of a generation.", (), LATENCY_S),
    "request_queue_time_seconds": MetricSpec("histogram", "Time waiting to be scheduled.", (), LATENCY_S),
    "request_inference_time_seconds": MetricSpec("histogram", "Time from being scheduled to the end.", (), LATENCY_S),
    "request_prefill_time_seconds": MetricSpec("histogram", "Time from being scheduled to the first token.", (), LATENCY_S),
    "request_decode_time_seconds": MetricSpec("histogram", "Time from the first to the last token.", (), LATENCY_S),
    "request_prompt_tokens": MetricSpec("histogram", "Prompt tokens per request.", (), TOKENS),
    "request_generation_tokens": MetricSpec("histogram", "Generated tokens per request.", (), TOKENS),
    "request_max_num_generation_tokens": MetricSpec("histogram", "Most tokens any choice of a request generated.", (), TOKENS),
    "request_params_n": MetricSpec("histogram", "The request's n.", (), PARAM_N),
    "request_params_max_tokens": MetricSpec("histogram", "The request's max_tokens.", (), TOKENS),
    "request_num_preemptions": MetricSpec("histogram", "Preemptions per request.", (), PREEMPTIONS),
    "request_prefill_kv_computed_tokens": MetricSpec("histogram", "Prompt tokens computed, not taken from the cache.", (), TOKENS),
    "startup_phase_seconds": MetricSpec("gauge", "Wall-clock seconds of each start-up phase; phases overlap, `total` spans all.", ("phase",)),
    "startup_programs": MetricSpec("gauge", "Programs of a start by source: cache, compiled, or beside requests cache_later (from the cache) and later (compiled).", ("source",)),
    "engine_restarts": MetricSpec("counter", "Times the engine process was started again after its end."),
    "request_retries": MetricSpec("counter", "Requests without output whose engine died, submitted to another one."),
    "client_disconnects": MetricSpec("counter", "Requests whose client left before the end."),
    "key_requests": MetricSpec("counter", "Requests by API key, for keys with a name.", ("key",)),
    "key_prompt_tokens": MetricSpec("counter", "Prompt tokens by API key, of requests that have ended.", ("key",)),
    "key_generation_tokens": MetricSpec("counter", "Generated tokens by API key, of requests that have ended.", ("key",)),
    "key_rejections": MetricSpec("counter", "Requests refused by a limit of their API key: concurrent, requests or tokens.", ("key", "reason")),
    "event_loop_lag_seconds": MetricSpec("histogram", "Delay of a timer of an API process: time in which its event loop served no other request.", (), LOOP_LAG_S),
    "event_loop_longest_turn_seconds": MetricSpec("gauge", "Longest time within the last minute in which an API process ran callbacks and looked at no socket."),
    "event_loop_long_turns": MetricSpec("counter", "Turns of an API process's event loop that took more than 20 ms: everything else waited."),
    "reply_bytes": MetricSpec("gauge", "Bytes reserved for the log-probabilities of replies under way (--max-reply-memory)."),
    "http_request_duration_seconds": MetricSpec("histogram", "Time from the headers of an HTTP request to the end of its reply.", (), LATENCY_S),
    "http_connections": MetricSpec("gauge", "Open HTTP connections."),
    "body_bytes": MetricSpec("gauge", "Bytes of request bodies that are being read or prepared, and of the stored responses that they continue (--max-body-memory)."),
    "queued_prompt_tokens": MetricSpec("gauge", "Prompt tokens of requests that have no output yet."),
    "request_capacity": MetricSpec("gauge", "Requests that may run and wait (--max-num-seqs + --max-queued-requests); 0 without an engine."),
    "build_info": MetricSpec("gauge", "1, with the version as a label.", ("version",)),
    "surplus_connections": MetricSpec("counter", "Connections beyond --max-connections: answered 503, or closed."),
    "http_requests": MetricSpec("counter", "HTTP requests by route and status.", ("route", "status")),
}
# fmt: on

_PROCESS_METRICS: Final = frozenset(
    {
        "build_info",
        "event_loop_lag_seconds",
        "event_loop_longest_turn_seconds",
        "event_loop_long_turns",
        "http_request_duration_seconds",
        "http_connections",
        "body_bytes",
        "reply_bytes",
        "surplus_connections",
    }
)
"""Metrics of an API process, whatever models it serves: they are labelled with the first one."""
_MODEL_GAUGES: Final = (
    "cache_config_info",
    "lora_requests_info",
    "model_token_flops",
    "model_step_read_bytes",
    "startup_phase_seconds",
    "startup_programs",
)
"""Gauges that have no value until an engine is ready."""
_LARGEST: Final = (
    *(PREFIX + name for name in _MODEL_GAUGES),
    PREFIX + "request_capacity",
    PREFIX + "build_info",
    PREFIX + "event_loop_longest_turn_seconds",
    "process_max_fds",
    "process_open_fds",
)
"""Gauges that are equal in all API processes, or missing in some, or that have a limit for each process."""
_TOTALS: Final = frozenset(PREFIX + name for name, spec in ENGINE_METRICS.items() if spec.is_total)
_EARLIEST: Final = "process_start_time_seconds"
_CREATED_SUFFIX: Final = "_created"

_KINDS: Final = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}


class FamilySnapshot(msgspec.Struct, frozen=True, array_like=True):
    """One metric with its samples: (name, labels, value)."""

    name: str
    help: str
    kind: str
    samples: list[tuple[str, dict[str, str], float]]


class _Snapshot(Collector):
    """The metrics of a snapshot."""

    def __init__(self, families: Iterable[FamilySnapshot]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.help, family.kind)
            for sample in family.samples:
                metric.add_sample(*sample)
            yield metric


def merged(snapshots: Sequence[Iterable[FamilySnapshot]]) -> list[FamilySnapshot]:
    """Return the metrics of several API processes as those of one."""
    families: dict[str, FamilySnapshot] = {}
    totals: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for family in chain(*snapshots):
        families.setdefault(family.name, family)
        samples = totals.setdefault(family.name, {})
        for name, labels, value in family.samples:
            key = (name, tuple(labels.items()))
            samples[key] = _together(name, samples[key], value) if key in samples else value
    return [
        FamilySnapshot(name, family.help, family.kind, [(s, dict(pairs), v) for (s, pairs), v in totals[name].items()])
        for name, family in families.items()
    ]


def counted(snapshot: Iterable[FamilySnapshot]) -> list[FamilySnapshot]:
    """Return what a process has counted: what its successor adds to its own counts, so that no sum falls.

    The totals of the engine are left out: it reports them to the next process anew.
    """
    return [family for family in snapshot if family.kind in ("counter", "histogram") and family.name not in _TOTALS]


def _together(name: str, one: float, other: float) -> float:
    if name.endswith(_CREATED_SUFFIX) or name == _EARLIEST:
        return min(one, other)
    return max(one, other) if name in _LARGEST else one + other


def exposition(*snapshots: Iterable[FamilySnapshot]) -> bytes:
    """The Prometheus text format of the sums over API processes."""
    return generate_latest(_Snapshot(merged(snapshots)))


def _new_family(name: str, spec: MetricSpec, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    extra: dict[str, Any] = {"buckets": spec.buckets} if spec.buckets else {}
    family: Counter | Gauge | Histogram
    family = _KINDS[spec.kind](PREFIX + name, spec.help, BASE_LABELS + spec.labels, registry=registry, **extra)
    return family


class Metrics:
    """The registry and its metrics, addressed by the names of `METRICS`."""

    def __init__(
        self,
        model_name: str,
        engine: str = "0",
        shared: Metrics | None = None,
        *,
        adapters: Sequence[str] = (),
        max_adapters: int = 0,
        names: Collection[str] = METRICS,
    ) -> None:
        """engine: number of the replica. shared: other metrics of this server, whose registry is used.

        adapters: names of the adapters that each engine loads at its start. max_adapters: places for adapters in each.
        names: metrics that have a value from the start if they have no labels of their own.
        """
        self.model_name = model_name
        self._adapters, self._max_adapters = tuple(adapters), max_adapters
        self.registry: CollectorRegistry = CollectorRegistry() if shared is None else shared.registry
        self._base = {"model_name": model_name, "engine": engine}
        self._families: dict[str, Counter | Gauge | Histogram] = {} if shared is None else shared._families
        self._children: dict[tuple[str, ...], Counter | Gauge | Histogram] = {}
        self._replicas: dict[int, Metrics] = {}
        self._totals: dict[tuple[str, str], int] = {}
        """The last total that the engine reported, by metric and label values."""
        if shared is None:
            ProcessCollector(registry=self.registry)
            self._families = {name: _new_family(name, spec, self.registry) for name, spec in METRICS.items()}
        for name in names:
            if not METRICS[name].labels:
                self._child(name)
        for phase in ("warmup", "serving"):
            self._child("compilations", phase=phase)
        if shared is None:
            self.set("build_info", 1, version=__version__)
        if "request_success" in names:
            for reason in ("stop", "length", "abort", "error"):
                self._child("request_success", finished_reason=reason)

    def of_engine(self, replica: int) -> Metrics:
        """Return the metrics of a replica of this server: its samples have the replica's number as the label `engine`."""
        if replica and replica not in self._replicas:
            self._replicas[replica] = Metrics(
                self.model_name,
                str(replica),
                self,
                adapters=self._adapters,
                max_adapters=self._max_adapters,
                names=ENGINE_METRICS,
            )
        return self._replicas[replica] if replica else self

    def of_model(self, name: str, *, adapters: Sequence[str] = (), max_adapters: int = 0) -> Metrics:
        """Return the metrics of a further model of this server: its samples have its name as the label `model_name`."""
        names = METRICS.keys() - _PROCESS_METRICS
        return Metrics(name, shared=self, adapters=adapters, max_adapters=max_adapters, names=names)

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
        """Publish what the engine reports when it is ready."""
        self.record_adapters(self._adapters)
        self.set(
            "cache_config_info",
            1,
            block_size=str(model_info.block_size),
            num_gpu_blocks=str(model_info.num_kv_blocks),
            cache_dtype=model_info.kv_dtype,
        )
        if (work := model_info.work) is not None:
            self.set("model_token_flops", work.layer_flops, part="layers")
            self.set("model_token_flops", work.head_flops, part="head")
            self.set("model_step_read_bytes", work.read_bytes)

    def record_adapters(self, names: Sequence[str]) -> None:
        """Publish the names of the adapters that are loaded from now on."""
        self._forget({"lora_requests_info"})
        self.set(
            "lora_requests_info",
            time.time(),
            max_lora=str(self._max_adapters),
            running_lora_adapters=",".join(names),
            waiting_lora_adapters="",
        )

    def record_stats(self, stats: EngineStats) -> None:
        """Publish one report of the engine."""
        for name, spec in ENGINE_METRICS.items():
            value = getattr(stats, name)
            if spec.kind == "histogram":
                for observed in value:
                    self.observe(name, observed)
            elif spec.labels:
                for key, number in value.items():
                    self._record(name, spec, number, key)
            elif value or spec.kind == "gauge":
                self._record(name, spec, value)

    def _record(self, name: str, spec: MetricSpec, number: Any, key: str = "") -> None:
        labels = dict(zip(spec.labels, key.split("/"), strict=True)) if key else {}
        if spec.kind == "gauge":
            self.set(name, number, **labels)
            return
        if spec.is_total:
            total, number = number, number - self._totals.get((name, key), 0)
            self._totals[name, key] = total
        self.inc(name, number, **labels)

    def forget_engine(self) -> None:
        """Clear the gauges of an engine that has ended; counters keep their values."""
        for key, child in self._children.items():
            if key[0] in ENGINE_METRICS and isinstance(child, Gauge):
                child.set(0)
        self._forget(_MODEL_GAUGES)
        self._totals = {}

    def _forget(self, names: Collection[str]) -> None:
        for key in [key for key in self._children if key[0] in names]:
            name, *labels = key
            self._families[name].remove(*self._base.values(), *labels)
            del self._children[key]

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
