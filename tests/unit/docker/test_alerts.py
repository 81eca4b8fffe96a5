"""Every alert names metrics that exist and a section of the runbook; promtool fires each where it should, and only there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.architecture.test_docs import anchors
from tests.unit.docker.alert_rules import CASES, FILE, ROOT, RULES, RUNBOOK, promtool_test, shortened
from tests.unit.docker.test_dashboard import SERIES

PROMTOOL = shutil.which("promtool")
_FOREIGN = {"up": {"job"}, "process_open_fds": {"job"}, "process_max_fds": {"job"}}
"""Series that Prometheus itself and its client library make."""
_METRIC = re.compile(r"(jaxserve:\w+|\bup\b|process_\w+)(?:\{([^}]*)\})?")


def needs_promtool() -> str:
    if PROMTOOL is None:
        pytest.skip("no promtool on this machine: apt-get install prometheus")
    return PROMTOOL


@pytest.mark.parametrize("alert", RULES)
def test_an_alert_asks_for_series_and_labels_that_exist(alert: str) -> None:
    expression = RULES[alert]["expr"]
    found = _METRIC.findall(expression)
    assert found
    known = SERIES | _FOREIGN
    for series, labels in found:
        assert series in known
        assert set(re.findall(r"(\w+)(?:=|!)", labels)) <= known[series], expression
    everything = {label for series, _ in found for label in known[series]} | {"job"}
    for names in re.findall(r"(?:without|by) \(([^)]*)\)", expression):
        assert {name.strip() for name in names.split(",")} <= everything


def test_refusals_of_any_model_are_compared_with_the_requests_of_the_server() -> None:
    """HTTP requests have the first model's name: a quotient by model would have no value for another one."""
    refused, requests = re.findall(r"without \(([^)]*)\)", RULES["JaxserveRequestsRefused"]["expr"])
    assert "model_name" in refused.split(", ")
    assert "model_name" in requests.split(", ")


def test_a_long_prompt_that_is_being_computed_is_no_stall() -> None:
    """`prompt_tokens` counts a whole prompt with its first output token; `iteration_tokens_total` counts every step."""
    assert _METRIC.findall(RULES["JaxserveStalled"]["expr"]) == [
        ("jaxserve:num_requests_running", ""),
        ("jaxserve:iteration_tokens_total_sum", ""),
    ]


@pytest.mark.parametrize("alert", RULES)
def test_an_alert_says_what_happened_and_where_to_read_on(alert: str) -> None:
    rule = RULES[alert]
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert {"summary", "description", "runbook"} == set(rule["annotations"])
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert (ROOT / page).resolve() == RUNBOOK
    assert anchor in anchors(RUNBOOK)
    assert anchor == alert.lower()


def test_every_section_of_the_runbook_belongs_to_an_alert() -> None:
    sections = re.findall(r"^## (Jaxserve\w+)$", RUNBOOK.read_text("utf-8"), re.M)
    assert sections == list(RULES), "in the order of the rules"


def test_every_alert_has_series_that_fire_it_and_series_that_do_not() -> None:
    assert list(CASES) == list(RULES)


@pytest.mark.slow
def test_promtool_fires_each_alert_for_the_bad_server_only(tmp_path: Path) -> None:
    file = tmp_path / "test.yml"
    file.write_text(json.dumps(promtool_test()))
    done = subprocess.run([needs_promtool(), "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_promtool_would_see_an_alert_that_does_not_fire(tmp_path: Path) -> None:
    file = tmp_path / "test.yml"
    broken = promtool_test()
    for series in broken["tests"][1]["input_series"]:
        series["values"] = "1x40"
    file.write_text(json.dumps(broken))
    done = subprocess.run([needs_promtool(), "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode != 0


def test_rules_with_shorter_times_are_valid_and_otherwise_the_same(tmp_path: Path) -> None:
    rules = FILE.read_text("utf-8")
    short = shortened(rules, 100)
    assert "[3000ms]" in short
    assert "offset 9000ms" in short
    assert not re.search(r"(\[|for: |offset )\d+[mh]\b", short)
    assert re.sub(r"\d+ms\b", "", short) == re.sub(r"((?:\[|for: |offset ))\d+[smh]\b", r"\1", rules)
    file = tmp_path / "alerts.yml"
    file.write_text(short)
    subprocess.run([needs_promtool(), "check", "rules", str(file)], capture_output=True, check=True)


@pytest.mark.slow
def test_the_use_of_a_device_is_what_the_handbook_computes(tmp_path: Path) -> None:
    """10 tokens and 1 step a second, of 100 operations for a token and 50 bytes for a step."""
    page = (ROOT / "docs/operating.md").read_text("utf-8")
    flops, read = re.findall(r"^(rate\(jaxserve:iteration_tokens_total_\w+\[1m\]\).*)$", page, re.M)
    of_engine = 'model_name="m",engine="0"'
    series = {
        f"jaxserve:iteration_tokens_total_sum{{{of_engine}}}": "0+150x20",
        f"jaxserve:iteration_tokens_total_count{{{of_engine}}}": "0+15x20",
        f'jaxserve:model_token_flops{{{of_engine},part="layers"}}': "100x20",
        f'jaxserve:model_token_flops{{{of_engine},part="head"}}': "7x20",
        f"jaxserve:model_step_read_bytes{{{of_engine}}}": "50x20",
    }
    expected = [(flops, 1000 / 989e12), (read, 50 / 3.35e12)]
    rules, file = tmp_path / "rules.yml", tmp_path / "test.yml"
    rules.write_text("groups: []\n")
    test = {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": expr, "eval_time": "4m", "exp_samples": [{"labels": f"{{{of_engine}}}", "value": value}]}
            for expr, value in expected
        ],
    }
    file.write_text(json.dumps({"rule_files": [str(rules)], "tests": [test]}))
    done = subprocess.run([needs_promtool(), "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
