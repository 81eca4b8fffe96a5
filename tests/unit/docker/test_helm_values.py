"""Each value of the Helm chart takes effect or is refused, whatever the chart makes; keys come from a secret alone."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
import yaml

from tests.tools.chart_values import BASES, FIXTURE, OTHERS, Outcome, all_paths, outcomes, value_of
from tests.tools.render_chart import CASES, can_render, digest, render
from tests.unit.docker.manifests import templates
from tests.unit.docker.test_helm import SCHEMA, fixture

RENDERED: dict[str, Any] = json.loads(FIXTURE.read_text("utf-8"))
MAKES_PODS = ("Deployment/", "LeaderWorkerSet/", "RayService/")
KEY = {
    "name": "JAXSERVE_API_KEY",
    "valueFrom": {"secretKeyRef": {"name": "jaxserve", "key": "api-key", "optional": True}},
}


def rendered(base: str) -> dict[str, Outcome]:
    found: dict[str, Outcome] = RENDERED["outcomes"][base]
    return found


def test_the_outcomes_are_of_the_chart_as_it_is() -> None:
    assert RENDERED["chart"] == digest(), "run `python -m tests.tools.chart_values`"
    assert set(RENDERED["outcomes"]) == set(BASES)


@pytest.mark.skipif(
    not can_render(), reason="no helm, and no package helm-python-sdk: the outcomes are compared by the chart's hash"
)
@pytest.mark.parametrize("base", BASES)
def test_helm_finds_the_outcomes(base: str) -> None:
    assert outcomes(base) == rendered(base)


@pytest.mark.parametrize("base", BASES)
def test_every_value_changes_a_document_or_is_refused_by_its_name(base: str) -> None:
    found = rendered(base)
    assert sorted(found) == sorted(all_paths())
    ignored = [path for path, outcome in found.items() if not outcome]
    assert not ignored, f"without effect: {ignored}"
    unnamed = [path for path, outcome in found.items() if isinstance(outcome, str) and path not in outcome]
    assert not unnamed, f"refused without their name: {unnamed}"


@pytest.mark.parametrize("base", BASES)
def test_every_value_was_changed_to_another_one_that_the_schema_allows(base: str) -> None:
    assert set(OTHERS) <= set(all_paths())
    for path in all_paths():
        value, schema = value_of(base, path), SCHEMA
        other = OTHERS.get(path, not value)
        assert other != value, path
        for name in path.split("."):
            schema = schema["properties"][name]
        jsonschema.validate(other, schema)


@pytest.mark.parametrize("path", all_paths())
def test_no_value_is_refused_everywhere(path: str) -> None:
    assert any(isinstance(rendered(base)[path], list) for base in BASES)


def test_the_key_and_the_start_reach_the_pods_of_every_kind() -> None:
    for path in ("secretName", "startup.timeout"):
        for base in BASES:
            outcome = rendered(base)[path]
            assert isinstance(outcome, list)
            assert any(name.startswith(MAKES_PODS) for name in outcome), (base, path)


@pytest.mark.parametrize("case", CASES)
def test_containers_that_serve_get_the_key_from_the_secret_and_no_command_has_it(case: str) -> None:
    for document in fixture(case).values():
        for template in templates(document):
            for container in template["spec"]["containers"]:
                if container["name"] != "ray-head":  # no replica and no ingress runs there
                    assert KEY in container["env"]
                assert "KEY" not in str(container.get("command", "")) + str(container.get("args", ""))
        if document["kind"] == "RayService":
            (application,) = yaml.safe_load(document["spec"]["serveConfigV2"])["applications"]
            assert "api_key" not in application["args"]


@pytest.mark.skipif(not can_render(), reason="no helm, and no package helm-python-sdk")
@pytest.mark.parametrize("file", ["gpu", "multi-host-gpu", "ray"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("api_key", "put the keys into api-key of the secret"),
        ("model", "set model"),
        ("host", "pods answer on all their addresses"),
        ("port", "pods answer on 8000"),
        ("num_hosts", "the LeaderWorkerSet sets it from hosts"),
    ],
)
def test_settings_that_the_chart_sets_are_refused(file: str, name: str, message: str) -> None:
    with pytest.raises(Exception, match=re.escape(f"settings.{name}: ") + ".*" + re.escape(message)):
        render(file, {"settings": {name: "x"}})
