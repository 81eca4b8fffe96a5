"""The flags of `jaxserve bench`, with the names and meanings of `vllm bench serve`."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, get_args

from jaxserve.cli.flags import add_flags
from jaxserve.runtime.settings import ENGINE_SECTIONS
from jaxserve.tools.bench.client import ENDPOINTS
from jaxserve.tools.bench.report import DEFAULT_PERCENTILES, GOODPUT_METRICS
from jaxserve.tools.bench.workload import WorkloadName

T = TypeVar("T", int, float)


def add_serve(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument("--url", "--base-url", help="base URL (default: from JAXSERVE_HOST and JAXSERVE_PORT)")
    server.add_argument("--model", help="model to ask for (default: the first one the server lists)")
    server.add_argument(
        "--backend", choices=tuple(ENDPOINTS), default="openai-chat", help="chat completions (default) or completions"
    )
    server.add_argument("--endpoint", metavar="PATH", help="path of the requests (default: the backend's)")
    server.add_argument("--api-key", help="sent as bearer token (default: JAXSERVE_API_KEY)")
    server.add_argument(
        "--tokenizer", metavar="PATH", help="GGUF file or directory of the model, for servers without /tokenize"
    )
    server.add_argument(
        "--extra-body", type=_json_object, default={}, metavar="JSON", help="fields for every request; null removes one"
    )
    server.add_argument("--keep-alive", action="store_true", help="reuse connections (default: one for each request)")
    server.add_argument(
        "--timeout", type=_positive_number, default=3600.0, metavar="SECONDS", help="longest request (default: 3600)"
    )
    load = parser.add_argument_group("load")
    _add_workload(load)
    load.add_argument("--num-prompts", type=_counts, default=[32], metavar="N[,N...]", help="requests (default: 32)")
    load.add_argument(
        "--max-concurrency",
        type=_counts,
        metavar="N[,N...]",
        help="requests at a time (default: all); several: a sweep",
    )
    load.add_argument(
        "--request-rate", type=_positive_number, default=math.inf, metavar="X", help="requests a second (default: inf)"
    )
    load.add_argument(
        "--burstiness",
        type=_positive_number,
        default=1.0,
        metavar="X",
        help="shape of the arrivals of --request-rate: 1 is a Poisson process (default), less makes bursts, more is more even",
    )
    load.add_argument("--seed", type=int, default=0, help="seed of prompts, lengths and arrivals (default: 0)")
    report = parser.add_argument_group("report")
    report.add_argument(
        "--goodput",
        nargs="+",
        type=_limit,
        metavar="METRIC:MS",
        help=f"count the requests within limits of {', '.join(GOODPUT_METRICS)}, e.g. ttft:500 tpot:50",
    )
    _add_report(report)
    report.add_argument(
        "--save-detailed", action="store_true", help="write the values of every request, too, with --json"
    )
    report.add_argument("--label", help="name of the server in --json and --plot (default: the model)")
    report.add_argument("--plot", metavar="FILE", help="draw latency against throughput: .png, .svg or .pdf")


def add_offline(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    _add_workload(load)
    load.add_argument("--num-prompts", type=_positive, default=32, metavar="N", help="requests (default: 32)")
    load.add_argument(
        "--max-concurrency", type=_positive, metavar="N", help="requests in the engine at a time (default: all)"
    )
    load.add_argument(
        "--structured-outputs",
        type=_json_object,
        metavar="JSON",
        help='constrain every reply, as the request field of that name: \'{"json": {"type": "array"}}\'',
    )
    _add_report(parser.add_argument_group("report"))
    add_flags(parser, sections=ENGINE_SECTIONS)  # --seed is the seed of the prompts as well


def add_startup(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--num-warm", type=_count, default=3, metavar="N", help="warm starts after the cold one (default: 3)"
    )
    parser.add_argument(
        "--changed-flags",
        metavar="FLAGS",
        help="flags of as many further starts with the same cache, e.g. '--max-model-len 4096'",
    )
    parser.add_argument(
        "--timeout", type=_positive_number, default=600.0, metavar="SECONDS", help="longest start (default: 600)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    parser.add_argument("serve_words", nargs="*", metavar="SERVE OPTIONS", help="after `--`: MODEL and flags of serve")


def _add_workload(group: Any) -> None:
    group.add_argument("--workload", choices=get_args(WorkloadName), default="chat", help="default: chat")
    group.add_argument("--input-len", type=_positive, metavar="N", help="prompt tokens instead of the workload's")
    group.add_argument("--output-len", type=_positive, metavar="N", help="output tokens instead of the workload's")
    group.add_argument(
        "--num-warmups", type=_count, default=0, metavar="N", help="requests before the clock starts (default: 0)"
    )


def _add_report(group: Any) -> None:
    group.add_argument(
        "--metric-percentiles",
        type=_percentiles,
        default=list(DEFAULT_PERCENTILES),
        metavar="P[,P...]",
        help=f"percentiles of the latencies (default: {','.join(f'{percent:g}' for percent in DEFAULT_PERCENTILES)})",
    )
    group.add_argument("--json", metavar="FILE", help="write the figures, named as `vllm bench serve` names them")


def _positive(text: str, least: int = 1) -> int:
    value = _number(text, int, "a whole number")
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} is less than {least}")
    return value


_count = partial(_positive, least=0)


def _counts(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _number(text: str, kind: Callable[[str], T], noun: str) -> T:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {noun}") from None


def _positive_number(text: str) -> float:
    value = _number(text, float, "a number")
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _percentiles(text: str) -> list[float]:
    values = [_number(part, float, "a number") for part in text.split(",")]
    for value in values:
        if not 0 <= value <= 100:
            raise argparse.ArgumentTypeError(f"{value:g} is not between 0 and 100")
    return values


def _limit(text: str) -> tuple[str, float]:
    name, colon, limit = text.partition(":")
    if not colon or name not in GOODPUT_METRICS:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(f'{m}:MS' for m in GOODPUT_METRICS)}")
    return name, _positive_number(limit)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"a JSON object is needed, not {text}")
    return value
