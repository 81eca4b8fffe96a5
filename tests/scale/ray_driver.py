"""Deploys the application, with fake engines unless these are null, on the cluster of RAY_ADDRESS, until stdin ends.

Each line of stdin has arguments that change: the application is deployed again, while it runs.
"""

from __future__ import annotations

import json
import sys

import ray
from ray import serve
from ray.serve._private import api as serve_api

from jaxserve.ray.deployments import build
from tests.e2e.http_server import TOKENIZER, fake_server_command
from tests.scale.ray_cluster import HTTP_PORT, START_TIMEOUT_S


def main() -> None:
    arguments, fake = json.loads(sys.argv[1]), json.loads(sys.argv[2])
    sections = {"cache": {"publish_pages": True}, "server": {"port": 0, "engine_restarts": 0}}
    serve_api.HTTP_PROXY_TIMEOUT = START_TIMEOUT_S  # 60 s, which the proxies' imports alone take on a busy machine
    ray.init(log_to_driver=True)
    serve.start(http_options={"host": "0.0.0.0", "port": HTTP_PORT, "location": "HeadOnly"})
    command = None if fake is None else fake_server_command(sections, fake)
    given = {"model": str(TOKENIZER), "served_model_name": "tiny", **arguments}
    while True:
        serve.run(build(given, command), name="jaxserve")
        sys.stdout.write("deployed\n")
        sys.stdout.flush()
        changes = sys.stdin.readline()
        if not changes:
            break
        given |= json.loads(changes)
    serve.delete("jaxserve")


if __name__ == "__main__":
    main()
