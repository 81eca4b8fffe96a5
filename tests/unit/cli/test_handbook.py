"""The handbook quotes lines that the program logs, and each of its commands has a test that runs it.

Its commands are the lines of its blocks, whatever program they start, and the texts between backquotes that start one of
`PROGRAMS` with arguments.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.documented_commands import SHELLS, shown_in

ROOT = Path(__file__).parents[3]
PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("operating", "runbook", "monitoring", "kubernetes", "startup", "security", "threat-model")}  # fmt: skip
HANDBOOK, RUNBOOK = PAGES["operating"], PAGES["runbook"]
QUOTED = re.findall(r"`([^`]+)`", "\n".join(
    row.split("|")[1] for row in HANDBOOK.partition("## Lines of the log\n")[2].splitlines() if row.startswith("| `")
))  # fmt: skip
IN_RUNBOOK = (
    "the engine is not started again",
    "ended by",
    "the engine could not start",
    "ended by signal",
    "has been silent for more than",
    "request ... failed",
    "connections are open, more are refused",
)
RUN_BY = {
    "jaxserve doctor": "tests/unit/cli/test_first_hour.py::test_doctor_has_a_fix_for_everything_that_is_wrong",
    "jaxserve check": "tests/unit/cli/test_first_hour.py::test_check_names_line_key_and_suggestion",
    "jaxserve config": "tests/unit/cli/test_first_hour.py::test_config_prints_what_would_be_in_force",
    "jaxserve models": "tests/unit/cli/test_models_and_completion.py::test_models_of_the_hub_cache_and_of_folders_are_listed_with_a_verdict",
    "jaxserve completion": "tests/unit/cli/test_models_and_completion.py::test_the_script_of_each_shell_is_valid",
    "jaxserve status": "tests/unit/cli/test_first_hour.py::test_status_is_one_screen",
    "jaxserve health": "tests/unit/cli/test_main.py::test_health_exits_by_the_answer",
    "jaxserve plan": "tests/e2e/test_readme.py::test_plan_as_shown_fits",
    "jaxserve bench serve": "tests/e2e/test_readme.py::test_benchmark_measures_the_server",
    "jaxserve serve": "tests/e2e/test_readme.py::test_make_starts_the_server",
    "jaxserve serve --otlp-traces-endpoint": "tests/e2e/test_tracing.py::test_every_request_of_two_processes_is_traced",
    "jaxserve upgrade": "tests/e2e/test_upgrade_real.py::test_the_default_model_is_replaced_twice_and_no_call_of_the_client_fails",
    "jaxserve upgrade --detach": "tests/e2e/test_upgrade_real.py::test_the_default_model_is_replaced_twice_and_no_call_of_the_client_fails",
    "jaxserve replay": "tests/unit/flight/test_replay.py::test_the_command_answers_0_if_all_steps_are_equal_and_imports_no_jax",
    "jaxserve compile": "tests/e2e/test_real_lifecycle.py::test_a_server_starts_warm_with_the_command_that_jaxserve_compile_prints",
    "jaxserve convert": "tests/engine/test_converted.py::test_a_killed_conversion_leaves_no_model_or_a_whole_one",
    "kill -HUP": "tests/e2e/test_tenants.py::test_keys_change_while_the_server_runs_and_commands_are_the_operators",
    "cp -a": "tests/e2e/test_real_lifecycle.py::test_second_start_compiles_no_program",
    "numactl --cpunodebind": "tests/e2e/test_process_limits.py::test_numactl_binds_the_server_and_its_engine_to_a_node",
    "systemctl enable": "tests/e2e/test_systemd.py::test_systemctl_starts_reloads_and_stops_the_server_and_streams_end_whole",
    "systemctl reload": "tests/e2e/test_systemd.py::test_systemctl_starts_reloads_and_stops_the_server_and_streams_end_whole",
    "ulimit -n": "tests/e2e/test_process_limits.py::test_a_limit_on_open_files_that_connections_exceed_is_named",
    "docker run": "tests/unit/docker/test_docker_commands.py::test_containers_get_devices_ports_volumes_and_time_to_end",
    "docker build": "tests/unit/docker/test_docker_commands.py::test_the_context_of_a_build_has_what_the_dockerfile_copies_and_no_more",
    "docker push": "tests/unit/docker/test_docker_commands.py::test_images_for_a_cluster_are_pushed_under_the_name_that_they_are_built_with",
    "docker compose": "tests/unit/docker/test_docker_commands.py::test_compose_accepts_the_profiles_of_the_page",
    "kubectl": "tests/unit/docker/test_kubectl.py::test_commands_of_the_pages_reach_the_pods",
    "kubectl apply": "tests/unit/docker/test_kubectl.py::test_the_command_in_a_manifest_makes_its_documents",
    "kubectl create": "tests/unit/docker/test_kubectl.py::test_the_secret_has_the_keys_that_pods_read",
    "helm": "tests/unit/docker/test_kubectl.py::test_helm_installs_upgrades_and_goes_back_and_keeps_the_claims",
    "pip install '.[otel]'": "tests/unit/test_wheel.py::test_extras_that_the_handbook_installs_exist_and_have_what_tests_use",
    "ulimit -l": "tests/e2e/test_process_limits.py::test_a_pod_with_tpus_raises_the_limit_of_locked_memory_and_becomes_the_server",
    "ls -l": "tests/e2e/test_handbook_commands.py::test_the_process_can_be_looked_at",
    "py-spy dump": "tests/e2e/test_handbook_commands.py::test_the_process_can_be_looked_at",
    "printf": "tests/e2e/test_handbook_commands.py::test_the_key_file_has_a_key_for_each_team_and_is_private",
    "curl http": "tests/e2e/test_handbook_commands.py::test_curl_asks_the_server_without_a_key_and_the_socket_of_the_operator",
    "curl --unix-socket": "tests/e2e/test_handbook_commands.py::test_curl_asks_the_server_without_a_key_and_the_socket_of_the_operator",
    "promtool test rules": "tests/unit/docker/test_alerts.py::test_promtool_fires_each_alert_for_the_bad_server_only",
    "make base-digests": "tests/unit/docker/test_docker_files.py::test_new_digests_are_those_of_the_bytes_that_the_registry_has",
}
"""The longest beginning of a command counts. A test's file has the name of the command, or the words below."""
RUN_AS = {
    "jaxserve serve --otlp-traces-endpoint": "otlp_traces_endpoint",
    "jaxserve convert": "tests.engine.killed_conversions",
    "kill -HUP": "signal.SIGHUP",
    "cp -a": '"cp", "-a"',
    "numactl --cpunodebind": '"numactl"',
    "systemctl enable": '"systemctl"',
    "systemctl reload": '"systemctl"',
    "make base-digests": "base_digests.sh",
    "docker run": 'shown("run")',
    "docker build": 'shown("build")',
    "docker push": 'shown("push")',
    "docker compose": '"docker-compose"',
    "kubectl": '"kubectl"',
    "kubectl apply": "kubectl apply",
    "kubectl create": '"create"',
    "helm": "helm.install(",
    "pip install '.[otel]'": '"pip install"',
    "promtool test rules": '"test", "rules"',
    "printf": '"printf"',
    "curl http": '"curl"',
}
NOT_RUN = {
    "make container-check": "a test itself, which needs root, buildah and minutes; tests/unit/docker has those of its parts",
    "make install": "every lane of tests begins with it",
}
"""The files and flags that these name are tested in tests/unit/docker/test_documented_commands.py."""
_LOGS = re.compile(r"\.(?:info|warning|error|critical)\(|silent|signal")
PROGRAMS = (
    "jaxserve", "make", "docker", "kubectl", "helm", "numactl", "pip", "cp", "kill", "ulimit", "systemctl", "curl", "ls",
    "py-spy", "promtool",
)  # fmt: skip
"""Programs of commands in sentences and tables."""


@cache
def messages() -> list[str]:
    """Return every text of the sources, with `\x00` in the places that are filled in."""
    found = []
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "jaxserve").rglob("*.py")]
    for source in sources:
        if not _LOGS.search(source):
            continue  # parsing all takes seconds
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[-.0-9]*[sdgfr]", "\x00", node.value))
            elif isinstance(node, ast.JoinedStr):
                parts = (str(part.value) if isinstance(part, ast.Constant) else "\x00" for part in node.values)
                found.append("".join(parts))
    return found


def is_logged(line: str) -> bool:
    """Return True if a message of the program has these words, with something else for each `...`."""
    pattern = re.compile(".+".join(re.escape(part.strip()) for part in line.split("...") if part.strip()), re.S)
    return any(pattern.search(message) for message in messages())


def commands() -> set[str]:
    """Return the commands in blocks, sentences and tables of the handbook's pages."""
    found = set()
    for name, text in PAGES.items():
        blocks = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", text, re.M | re.S)
        found |= {line.strip() for kind, block in blocks if kind in SHELLS for line in block.splitlines()}
        shown = shown_in(ROOT / "docs" / f"{name}.md")
        found |= {text for text in shown if text.split(" ")[0] in PROGRAMS and " " in text}
    return found - {""}


@pytest.mark.parametrize("line", [*QUOTED, *IN_RUNBOOK])
def test_a_quoted_line_is_one_that_the_program_logs(line: str) -> None:
    assert is_logged(line)


def test_quoted_lines_are_found() -> None:
    assert len(QUOTED) >= 20
    assert not is_logged("no such line is ... logged")
    text = " ".join(RUNBOOK.split())
    assert all(
        part.strip() in text for line in IN_RUNBOOK for part in line.replace("request ... ", "request ID ").split("...")
    )


@pytest.mark.parametrize("command", sorted(commands()))
def test_a_command_of_the_handbook_is_run_by_a_test(command: str) -> None:
    if any(command.startswith(begin) for begin in NOT_RUN):
        return
    place = max((begin for begin in RUN_BY if command.startswith(begin)), key=len, default=None)
    assert place is not None, "name the test that runs it"
    path, _, name = RUN_BY[place].partition("::")
    source = (ROOT / path).read_text(encoding="utf-8")
    assert f"def {name}(" in source
    words = place.split()
    runs = (RUN_AS[place],) if place in RUN_AS else (f'"{words[1]}"', " ".join(words[:2]))
    assert any(text in source for text in runs)


def test_commands_are_found() -> None:
    assert len(commands()) >= 30
    assert all(any(command.startswith(begin) for command in commands()) for begin in [*RUN_BY, *NOT_RUN])
