"""A server sends traces of its requests to a collector, those of its end as well."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.http_server import running

if TYPE_CHECKING:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

pytestmark = pytest.mark.slow

BODY = {"prompt": [5, 6], "max_tokens": 4}


@contextmanager
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """Run a collector that takes OTLP over HTTP."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    received: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces", received
        finally:
            server.shutdown()
            thread.join()


def test_every_request_of_two_processes_is_traced(tmp_path: Path) -> None:
    with collector() as (url, received):
        section = {"otlp_traces_endpoint": url, "api_processes": 2, "uds_dir": str(tmp_path)}
        with running({"vocab_size": 384, "eos_token_ids": []}, server=section) as server:
            for _ in range(6):
                assert server.request("POST", "/v1/completions", BODY)[0] == 200
            assert server.stop() == 0
    resources = [resource for message in received for resource in message.resource_spans]
    spans = [span for resource in resources for scope in resource.scope_spans for span in scope.spans]
    names = [span.name for span in spans]
    assert names.count("POST /v1/completions") == names.count("text_completion tiny") == 6
    assert names.count("decode") == 6
    of_choices = {span.parent_span_id for span in spans if span.name == "text_completion tiny"}
    assert of_choices == {span.span_id for span in spans if span.name == "POST /v1/completions"}
    services = {
        pair.value.string_value
        for resource in resources
        for pair in resource.resource.attributes
        if pair.key == "service.name"
    }
    assert services == {"jaxserve"}
