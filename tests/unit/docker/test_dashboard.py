"""The dashboard asks for metrics that the server has, by labels that they have, and no two panels lie on each other."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

from jaxserve.metrics import _PROCESS_METRICS, METRICS

BOARD: dict[str, Any] = json.loads(Path(__file__, "../../../../docker/grafana.json").resolve().read_text("utf-8"))
PANELS: list[dict[str, Any]] = BOARD["panels"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel.get("targets", [])]
_SUFFIXES = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
SERIES = {
    f"jaxserve:{name}{suffix}": {"model_name", "engine", "instance", "le", *spec.labels}
    for name, spec in METRICS.items()
    for suffix in _SUFFIXES[spec.kind]
}


def test_every_series_and_label_exists() -> None:
    assert EXPRESSIONS
    for expression in EXPRESSIONS:
        found = re.findall(r"(jaxserve:\w+)\{([^}]*)\}", expression)
        assert len(found) == expression.count("jaxserve:"), expression
        grouped = {name.strip() for names in re.findall(r"by \(([\w, ]+)\)", expression) for name in names.split(",")}
        for series, labels in found:
            assert series in SERIES
            assert {*re.findall(r"(\w+)=", labels), *grouped} <= SERIES[series], expression


def test_metrics_of_the_process_are_shown_whatever_model_is_chosen() -> None:
    """They have the first model's name, whatever models the process serves."""
    of_process = {"http_requests", *_PROCESS_METRICS}
    found = [
        (series, labels) for text in EXPRESSIONS for series, labels in re.findall(r"jaxserve:(\w+)\{([^}]*)\}", text)
    ]
    chosen = {series for series, labels in found if "model_name" in labels}
    assert chosen
    assert not {series for series in chosen if re.sub(r"_(total|bucket|sum|count)$", "", series) in of_process}


def test_panels_lie_beside_each_other_and_have_numbers_of_their_own() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    places = [panel["gridPos"] for panel in PANELS]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in itertools.combinations(places, 2):
        is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert is_beside or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]


def test_what_a_legend_names_is_what_its_series_are_grouped_by() -> None:
    for panel in PANELS:
        for target in panel.get("targets", []):
            named = re.findall(r"{{(\w+)}}", target["legendFormat"])
            assert all(re.search(rf"by \([\w, ]*\b{name}\b", target["expr"]) for name in named)
