"""A summary of the server's metrics and of the last refused and failed requests, for the page at `/`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from jaxserve.http.rejections import Rejection
from jaxserve.ipc.messages import ModelInfo
from jaxserve.metrics import PREFIX, FamilySnapshot

_NUMBERS: Final[Mapping[str, str]] = {
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
    "kv_cache_usage": "kv_cache_usage_perc",
    "prefix_cache_queries": "prefix_cache_queries_total",
    "prefix_cache_hits": "prefix_cache_hits_total",
    "preemptions": "num_preemptions_total",
    "prompt_tokens": "prompt_tokens_total",
    "generation_tokens": "generation_tokens_total",
    "padding_tokens": "padding_tokens_total",
    "engine_restarts": "engine_restarts_total",
}
_TIMES: Final = ("time_to_first_token", "inter_token_latency", "device_step", "host_gap")


class EngineInfo(msgspec.Struct):
    """Limits of the engine."""

    max_model_len: int
    max_num_seqs: int
    num_kv_blocks: int
    block_size: int
    kv_dtype: str
    platform: str
    num_devices: int
    vector_size: Annotated[
        int | None, Meta(description="Numbers of the vector of a text; null for a model that generates.")
    ] = None


class TimeTotal(msgspec.Struct):
    """Sum and number of observed times."""

    seconds: float
    count: float


class RefusedRequest(msgspec.Struct):
    """A refused or failed request, without anything that its client wrote."""

    time: Annotated[float, Meta(description="Unix time in seconds.")]
    route: str
    status: int
    param: Annotated[str | None, Meta(description="Path of the invalid field.")]


class LiveState(msgspec.Struct):
    """Numbers of one model, of all API processes and engines together. Differences of two states show what happened between them."""

    uptime_seconds: float
    engine: Annotated[EngineInfo | None, Meta(description="Null until an engine is ready.")]
    numbers: Annotated[dict[str, float], Meta(description="Gauges as they are, and counters since the start.")]
    steps: Annotated[dict[str, float], Meta(description="Steps of the engine by program and bucket.")]
    compilations: Annotated[dict[str, float], Meta(description="Compiled programs by phase.")]
    times: Annotated[dict[str, TimeTotal], Meta(description="Times since the start, by name.")]
    refused: Annotated[
        list[RefusedRequest], Meta(description="The last refused and failed requests of one API process.")
    ]


def engine_info(model_info: ModelInfo) -> EngineInfo:
    """Return what the page shows of an engine."""
    found = msgspec.convert(model_info, EngineInfo, from_attributes=True)
    found.vector_size = None if model_info.embedding is None else model_info.embedding.size
    return found


def live_state(
    snapshots: Sequence[Iterable[FamilySnapshot]],
    model_name: str,
    model_info: ModelInfo | None,
    refused: Iterable[Rejection],
    uptime_s: float,
) -> LiveState:
    """Return the summary of a model's metrics, over all API processes."""
    samples = [
        (name.removeprefix(PREFIX), labels, value)
        for snapshot in snapshots
        for family in snapshot
        for name, labels, value in family.samples
        if labels.get("model_name") == model_name
    ]

    def total(metric: str) -> float:
        return sum(value for name, _, value in samples if name == metric)

    def by_label(metric: str, *labels: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, given, value in samples:
            if name == metric:
                key = " ".join(given[label] for label in labels)
                found[key] = found.get(key, 0.0) + value
        return found

    return LiveState(
        uptime_seconds=uptime_s,
        engine=None if model_info is None else engine_info(model_info),
        numbers={name: total(metric) for name, metric in _NUMBERS.items()},
        steps=by_label("bucket_steps_total", "kind", "bucket"),
        compilations=by_label("compilations_total", "phase"),
        times={name: TimeTotal(total(f"{name}_seconds_sum"), total(f"{name}_seconds_count")) for name in _TIMES},
        refused=[RefusedRequest(one.time, one.route, one.status, one.param) for one in refused],
    )
