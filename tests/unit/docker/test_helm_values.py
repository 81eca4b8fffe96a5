"""Each value of the Helm chart takes effect or is refused, whatever the chart makes; keys come from a secret alone."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import Any

import jsonschema
import pytest
import yaml

from jaxserve.ray.settings import _FIXED, _OURS, RaySettings
from jaxserve.runtime.settings import BY_NAME
from tests.tools.chart_values import BASES, FIXTURE, OTHERS, Outcome, all_paths, outcomes, value_of
from tests.tools.render_chart import CASES, CHART, SETTINGS, can_render, digest, render
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


CHECKS = (CHART / "templates" / "checks.yaml").read_text("utf-8")
OF_THE_APPLICATION = {field.name for field in fields(RaySettings)} - set(BY_NAME)
"""Arguments of the application on Ray that are no settings of a server."""


def listed(variable: str) -> set[str]:
    """Return the names of a list in the chart's checks: that in front of a variable's test."""
    (line,) = (line for line in CHECKS.splitlines() if variable in line and "list " in line)
    return set(re.findall(r'"(\w+)"', line))


def test_names_of_all_settings_are_in_the_file_that_the_chart_reads() -> None:
    table = SETTINGS.read_text("utf-8")
    for setting in BY_NAME.values():
        assert f"| `{setting.name}` | `{setting.variable}` |" in table
    assert "drain_timeout_s" not in table
    assert "| `%s` | `JAXSERVE_%s` |" in CHECKS


def test_settings_that_the_application_on_ray_decides_are_refused_or_accepted_by_name() -> None:
    """`settings` has numbers and texts only, no mapping such as `resources`."""
    refused = set(
        re.findall(r'"(\w+)"', "".join(line for line in CHECKS.splitlines() if "list " in line or "dict " in line))
    )
    assert {*_FIXED, *_OURS} <= refused | {"upgrade_timeout"}
    accepted = listed("$ofRay :=")
    own = {"replicas", "num_cpus", "num_gpus", "start_timeout_s", "tpu_slice", "resources"}
    assert accepted == OF_THE_APPLICATION - own


@pytest.mark.skipif(not can_render(), reason="no helm, and no package helm-python-sdk")
@pytest.mark.parametrize(
    ("file", "name", "message"),
    [
        ("gpu", "drain_timeout_s", "no setting has this name"),
        ("gpu", "flight_recorder", "no setting has this name"),
        ("multi-host-gpu", "max_replicas", "no setting has this name"),
        ("ray", "max_sequences", "no setting has this name, nor has an argument of the application on Ray"),
        ("ray", "api_processes", "replicas of a RayService do not have this setting"),
        ("gpu", "ssl_certfile", "probes and Services ask over HTTP"),
        ("ray", "upgrade_timeout", "has no effect"),
        ("gpu", "upgrade_timeout", "has no effect"),
    ],
)
def test_settings_that_would_have_no_effect_are_refused(file: str, name: str, message: str) -> None:
    with pytest.raises(Exception, match=re.escape(f"settings.{name}: {message}")):
        render(file, {"settings": {name: 3}})


@pytest.mark.skipif(not can_render(), reason="no helm, and no package helm-python-sdk")
@pytest.mark.parametrize("file", ["gpu", "multi-host-gpu", "ray"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("api_key", "put the keys into api-key of the secret"),
        ("model", "set model"),
        ("host", "pods answer on all their addresses"),
        ("port", "pods answer on 8000"),
        ("kv_peer_token", "put it into kv-peer-token of the secret"),
        ("num_hosts", "the LeaderWorkerSet sets it from hosts"),
    ],
)
def test_settings_that_the_chart_sets_are_refused(file: str, name: str, message: str) -> None:
    with pytest.raises(Exception, match=re.escape(f"settings.{name}: ") + ".*" + re.escape(message)):
        render(file, {"settings": {name: "x"}})
