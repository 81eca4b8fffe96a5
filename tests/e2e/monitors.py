"""A real Prometheus and a real Alertmanager with the files of docker/monitoring, on ports of their own and in a hurry."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from jaxserve.tools.bench.startup import free_port
from tests.e2e.http_server import ROOT
from tests.unit.docker.alert_rules import shortened

PROMETHEUS = shutil.which("prometheus")
ALERTMANAGER = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
FOLDER = ROOT / "docker" / "monitoring"
LEAST_INTERVAL_S = 0.25
FACTOR = 100.0
"""By which durations of the rules are divided at this interval: five minutes become three seconds."""


@dataclass
class Webhook:
    """The receiver of notifications and what Alertmanager has posted to it."""

    url: str
    alerts: list[dict[str, Any]] = field(default_factory=list)
    arrived: threading.Condition = field(default_factory=threading.Condition)

    def wait_for(self, alert: str, instance: str, timeout_s: float = 240) -> dict[str, Any]:
        """Return the notification that this alert fires for a server. Raises AssertionError if none comes."""

        def found() -> dict[str, Any] | None:
            for posted in self.alerts:
                labels = posted["labels"]
                if labels["alertname"] == alert and labels["instance"] == instance and posted["status"] == "firing":
                    return posted
            return None

        with self.arrived:
            posted = self.arrived.wait_for(found, timeout_s)
        names = sorted({posted["labels"]["alertname"] for posted in self.alerts})
        assert posted is not None, f"{alert} of {instance} was not posted, but {names}"
        return posted

    @property
    def fired(self) -> set[tuple[str, str]]:
        """Alert and instance of all notifications."""
        return {(posted["labels"]["alertname"], posted["labels"]["instance"]) for posted in self.alerts}


@contextlib.contextmanager
def webhook() -> Iterator[Webhook]:
    """A receiver of notifications."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()
            with received.arrived:
                received.alerts += body["alerts"]
                received.arrived.notify_all()

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        received = Webhook(f"http://127.0.0.1:{server.server_port}/")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield received
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def monitoring(folder: Path, targets: list[str], api_key: str, reply_s: float) -> Iterator[Webhook]:
    """Prometheus and Alertmanager that watch `targets`, and all rules with shorter durations.

    reply_s: how long a server takes to answer /metrics. On a busy machine all durations are longer.
    """
    assert PROMETHEUS is not None and ALERTMANAGER is not None
    interval_s = max(LEAST_INTERVAL_S, 5 * reply_s)
    factor = FACTOR * LEAST_INTERVAL_S / interval_s
    scrape = f"{round(interval_s * 1000)}ms"
    with webhook() as received, contextlib.ExitStack() as stack:
        ports = [free_port(), free_port()]
        config = yaml.safe_load((FOLDER / "alertmanager.yml").read_text("utf-8"))
        config["route"] |= {"group_wait": "100ms", "group_interval": "200ms", "group_by": ["..."]}
        config["receivers"][0]["webhook_configs"] = [{"url": received.url}]
        write(folder / "alertmanager.yml", config)
        (folder / "key").write_text(api_key)
        (folder / "alerts.yml").write_text(shortened((FOLDER / "alerts.yml").read_text("utf-8"), factor))
        config = yaml.safe_load((FOLDER / "prometheus.yml").read_text("utf-8"))
        config["global"] = {"scrape_interval": scrape, "scrape_timeout": scrape, "evaluation_interval": scrape}
        config["rule_files"] = [str(folder / "alerts.yml")]
        config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{ports[0]}"]
        (job,) = config["scrape_configs"]
        job["authorization"]["credentials_file"] = str(folder / "key")
        job["static_configs"][0]["targets"] = targets
        write(folder / "prometheus.yml", config)
        program(
            stack, folder, ALERTMANAGER, "--cluster.listen-address=", f"--web.listen-address=127.0.0.1:{ports[0]}",
            f"--config.file={folder / 'alertmanager.yml'}", f"--storage.path={folder / 'alertmanager'}",
        )  # fmt: skip
        program(
            stack, folder, PROMETHEUS, f"--web.listen-address=127.0.0.1:{ports[1]}",
            f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'prometheus'}",
        )  # fmt: skip
        yield received


def write(file: Path, config: dict[str, Any]) -> None:
    """Write a config; JSON is YAML."""
    file.write_text(json.dumps(config))


def program(stack: contextlib.ExitStack, folder: Path, *command: str) -> None:
    """Start a program, which ends with the stack. Its output goes to a file."""
    log = stack.enter_context((folder / f"{Path(command[0]).name}.log").open("wb"))
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    stack.callback(process.wait)
    stack.callback(process.kill)
