"""The alert rules of docker/monitoring, and series that do and do not fire each of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import yaml

from tests.unit.docker.manifests import ROOT

FILE: Final = ROOT / "docker" / "monitoring" / "alerts.yml"
RUNBOOK: Final = ROOT / "docs" / "runbook.md"
RULES: Final[dict[str, dict[str, Any]]] = {
    rule["alert"]: rule
    for group in yaml.safe_load(FILE.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
}
"""By alert."""
_UNITS: Final = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True, slots=True)
class Case:
    """Values of a metric, one every 30 s in promtool's notation, of a server that fires the alert and of one that does not."""

    metric: str
    """With its labels other than job, instance and engine, and than model_name if that is `m`."""
    bad: str
    good: str


def counting(metric: str, bad: float, good: float) -> Case:
    """Return the case of a counter: its increases every 30 s."""
    return Case(metric, f"0+{bad}x40", f"0+{good}x40")


def constant(metric: str, bad: float, good: float) -> Case:
    """Return the case of a gauge."""
    return Case(metric, f"{bad}x40", f"{good}x40")


_OK: Final = 'jaxserve:http_requests_total{route="/v1/completions", status="200"}'
CASES: Final[dict[str, tuple[Case, ...]]] = {
    "JaxserveDown": (Case("up", "1x4 0x36", "1x40"),),
    "JaxserveMissing": (),  # there is no series
    "JaxserveNotServing": (Case("jaxserve:request_capacity", "0x40", "0x20 64x20"),),
    "JaxserveEngineRestarted": (Case("jaxserve:engine_restarts_total", "0x20 1x20", "1x40"),),
    "JaxserveStalled": (
        constant("jaxserve:num_requests_running", 3, 3),
        counting("jaxserve:iteration_tokens_total_sum", 0, 100),
        counting("jaxserve:generation_tokens_total", 0, 0),  # one long prompt is computed, which counts at its end
        counting("jaxserve:prompt_tokens_total", 0, 0),
    ),
    # The series begins with the first failure: an increase alone would not see it.
    "JaxserveStepsFail": (Case('jaxserve:failed_steps_total{reason="memory"}', "_x30 1x10", "1x40"),),
    "JaxserveErrors": (
        counting(_OK, 95, 99),
        counting('jaxserve:http_requests_total{route="/v1/completions", status="500"}', 5, 1),
        counting('jaxserve:http_requests_total{route="/ready", status="503"}', 9, 9),
    ),
    "JaxserveRequestsRefused": (
        counting(_OK, 95, 100),
        # Refusals have the name of their model, and HTTP requests that of the first one.
        counting('jaxserve:admission_rejections_total{reason="queue_full", model_name="second"}', 5, 0),
    ),
    "JaxserveQueueFull": (
        constant("jaxserve:num_requests_running", 32, 32),
        constant("jaxserve:num_requests_waiting", 25, 5),
        constant("jaxserve:request_capacity", 64, 64),
    ),
    "JaxserveKVCacheTooSmall": (
        counting("jaxserve:num_preemptions_total", 5, 5),
        counting('jaxserve:request_success_total{finished_reason="stop"}', 10, 100),
    ),
    "JaxserveSlowFirstToken": (
        counting('jaxserve:time_to_first_token_seconds_bucket{le="10"}', 90, 99),
        counting('jaxserve:time_to_first_token_seconds_bucket{le="20"}', 100, 100),
        counting('jaxserve:time_to_first_token_seconds_bucket{le="+Inf"}', 100, 100),
    ),
    "JaxserveSlowTokens": (
        counting('jaxserve:inter_token_latency_seconds_bucket{le="0.5"}', 90, 99),
        counting('jaxserve:inter_token_latency_seconds_bucket{le="1"}', 100, 100),
        counting('jaxserve:inter_token_latency_seconds_bucket{le="+Inf"}', 100, 100),
    ),
    "JaxserveCompilesWhileServing": (Case('jaxserve:compilations_total{phase="serving"}', "0x20 1x20", "0x40"),),
    "JaxserveEventLoopBlocked": (constant("jaxserve:event_loop_longest_turn_seconds", 0.8, 0.02),),
    "JaxserveConnectionsRefused": (Case("jaxserve:surplus_connections_total", "0x35 4x5", "4x40"),),
    "JaxserveKVTierFails": (Case('jaxserve:kv_tier_failures_total{reason="io"}', "_x30 1x10", "1x40"),),
    "JaxserveFewDescriptorsLeft": (
        constant("process_open_fds", 900, 90),
        constant("process_max_fds", 1024, 1024),
    ),
}
"""By alert."""


def promtool_test() -> dict[str, Any]:
    """Return the file for `promtool test rules`: after 20 minutes each alert fires for the instance `bad` and no other.

    Without any series only the alert fires that servers are missing.
    """
    return {
        "rule_files": [str(FILE)],
        "evaluation_interval": "30s",
        "tests": [
            {
                "interval": "30s",
                "input_series": [],
                "promql_expr_test": [
                    {
                        "expr": 'count by (alertname, instance) (ALERTS{alertstate="firing"})',
                        "eval_time": "20m",
                        "exp_samples": [{"labels": '{alertname="JaxserveMissing"}', "value": 1}],
                    }
                ],
            },
            *(
                {
                    "interval": "30s",
                    "input_series": [
                        {"series": _series(case.metric, instance), "values": values}
                        for case in cases
                        for instance, values in (("bad", case.bad), ("good", case.good))
                    ],
                    "promql_expr_test": [
                        {
                            "expr": f'count by (instance) (ALERTS{{alertname="{alert}", alertstate="firing"}})',
                            "eval_time": "20m",
                            "exp_samples": [{"labels": '{instance="bad"}', "value": 1}],
                        }
                    ],
                }
                for alert, cases in CASES.items()
                if cases
            ),
        ],
    }


def shortened(rules: str, factor: float) -> str:
    """Return `rules` with every duration divided by `factor`, for a test that cannot wait for minutes."""

    def shorter(found: re.Match[str]) -> str:
        seconds = int(found[2]) * _UNITS[found[3]] / factor
        return f"{found[1]}{max(round(seconds * 1000), 1)}ms"

    return re.sub(r"(\[|offset |for: )(\d+)([smh])\b", shorter, rules)


def _series(metric: str, instance: str) -> str:
    name, _, labels = metric.rstrip("}").partition("{")
    common = f'job="jaxserve", instance="{instance}"'
    if name.startswith("jaxserve:"):
        common += ', engine="0"' if "model_name=" in labels else ', model_name="m", engine="0"'
    return f"{name}{{{', '.join(filter(None, (common, labels)))}}}"
