"""Enough of Kubernetes' API for the real kubectl and Helm: kinds, documents, pods that run at once, logs and commands in pods.

It accepts what the schemas accept, and fills in the state that controllers and nodes would reach.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.unit.docker.kubernetes_schemas import SCHEMAS
from tests.unit.docker.manifests import templates
from tests.unit.docker.test_kubernetes import validate

Document = dict[str, Any]
KINDS: Final = [
    *(
        ("v1", kind)
        for kind in ("Pod", "Service", "Secret", "ConfigMap", "PersistentVolumeClaim", "Event", "Namespace", "Node")
    ),
    ("apps/v1", "Deployment"),
    ("autoscaling/v2", "HorizontalPodAutoscaler"),
    ("networking.k8s.io/v1", "NetworkPolicy"),
    ("policy/v1", "PodDisruptionBudget"),
    *SCHEMAS,
]
"""apiVersion and kind of what the cluster has."""
LOG: Final = "jaxserve is ready\n"
_VERBS: Final = ["create", "delete", "get", "list", "patch", "update", "watch"]
_NEVER_STRICT: Final = ("Secret", "Event", "Pod", "Namespace")


def plural(kind: str) -> str:
    """Return the name of a kind in paths."""
    name = kind.lower()
    return f"{name[:-1]}ies" if name.endswith("y") else f"{name}s"


@dataclass
class Cluster:
    """The documents of a cluster, and the requests that clients sent to it."""

    requests: list[tuple[str, str]] = field(default_factory=list)
    """Method and path with its query, in order."""
    documents: dict[tuple[str, str], Document] = field(default_factory=dict)
    """By plural kind and name; one namespace."""
    url: str = ""

    @property
    def kubeconfig(self) -> str:
        """The text of a file that leads clients here."""
        return yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "test",
                "clusters": [{"name": "test", "cluster": {"server": self.url}}],
                "users": [{"name": "test", "user": {}}],
                "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            }
        )

    def named(self, kind: str) -> list[str]:
        """Return the names of all documents of a kind."""
        return sorted(name for each, name in self.documents if each == plural(kind))

    def keep(self, document: Document) -> Document:
        """Keep a document, and make what it stands for."""
        name = document["metadata"]["name"]
        document["metadata"] |= {"namespace": "default", "uid": name, "resourceVersion": "2", "generation": 1}
        document["status"] = _status(document)
        self.documents[plural(document["kind"]), name] = document
        for number, template in enumerate(templates(document)):
            self._run(f"{name}-{number}", template)
        return document

    def _run(self, name: str, template: Document) -> None:
        containers = [
            {"name": each["name"], "image": each["image"], "imageID": "", "ready": True, "restartCount": 0,
             "state": {"running": {}}}
            for each in template["spec"]["containers"]
        ]  # fmt: skip
        self.documents["pods", name] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {**template["metadata"], "name": name, "namespace": "default", "uid": name},
            "spec": {**template["spec"], "nodeName": "node"},
            "status": {
                "phase": "Running",
                "conditions": [{"type": "Ready", "status": "True"}],
                "containerStatuses": containers,
            },
        }


def _without_server_fields(document: Document) -> Document:
    """Return a document as a file has it: without what clients and the server add to its metadata."""
    kept = ("name", "labels", "annotations")
    metadata = {key: value for key, value in document["metadata"].items() if key in kept}
    if "annotations" in metadata:
        metadata["annotations"] = {
            key: value for key, value in metadata["annotations"].items() if "kubectl.kubernetes.io" not in key
        }
    return document | {"metadata": metadata}


def _status(document: Document) -> Document:
    """Return the state of a document when all its pods serve, or of a node with eight GPUs."""
    if document["kind"] == "Node":
        return {"allocatable": {"cpu": "64", "memory": "512Gi", "nvidia.com/gpu": "8"}}
    replicas = document.get("spec", {}).get("replicas", 1)
    counts = dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"), replicas)
    conditions = [{"type": kind, "status": "True"} for kind in ("Available", "Ready")]
    return {"observedGeneration": 1, **counts, "conditions": conditions}


def merged(one: Document, other: Document) -> Document:
    """Return a document with a patch over it."""
    result = dict(one)
    for key, value in other.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key) or {}, value) if isinstance(value, dict) else value
    return result


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield number and bytes of each field of a message of protocol buffers; of numbers nothing."""
    at = 0

    def number() -> int:
        nonlocal at
        value, shift = 0, 0
        while True:
            byte = message[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(message):
        key = number()
        length = number()
        if key & 7 == 2:
            yield key >> 3, message[at : at + length]
            at += length


def _entries(fields: list[tuple[int, bytes]], number: int) -> dict[str, bytes]:
    pairs = [dict(_fields(entry)) for each, entry in fields if each == number]
    return {pair[1].decode(): pair.get(2, b"") for pair in pairs}


def _read(body: bytes) -> Document:
    """Return a document that a client sent: JSON, YAML or, for a secret, protocol buffers."""
    if not body.startswith(b"k8s\x00"):
        found: Document = yaml.safe_load(body)
        return found
    envelope = dict(_fields(body[4:]))
    kind = dict(_fields(envelope[1]))[2].decode()
    if kind != "Secret":
        return {}  # the options of a deletion
    secret = list(_fields(envelope[2]))
    metadata = list(_fields(dict(secret)[1]))
    return {
        "apiVersion": "v1",
        "kind": kind,
        "metadata": {
            "name": dict(metadata)[1].decode(),
            "labels": {name: value.decode() for name, value in _entries(metadata, 11).items()},
        },
        "data": {name: base64.b64encode(value).decode() for name, value in _entries(secret, 2).items()},
    }


def _group(api_version: str) -> Document:
    entry = {"groupVersion": api_version, "version": api_version.partition("/")[2]}
    return {"name": api_version.partition("/")[0], "versions": [entry], "preferredVersion": entry}


def discovery(path: str) -> Document | None:
    """Return what a path says about the kinds of the cluster, or None if it is no such path."""
    versions = sorted({version for version, _ in KINDS})
    if path == "/version":
        return {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = [_group(version) for version in versions if "/" in version]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    if path == "/openapi/v3":
        return {
            "paths": {_root(version)[1:]: {"serverRelativeURL": f"/openapi/v3{_root(version)}"} for version in versions}
        }
    if path.startswith("/openapi/v3/"):
        found = {kind: version for version, kind in KINDS if path == f"/openapi/v3{_root(version)}"}
        return {"openapi": "3.0.0", "paths": {_path_of(version, kind): _patch(version, kind) for kind, version in found.items()}}  # fmt: skip
    for version in versions:
        if path == _root(version):
            kinds = [kind for each, kind in KINDS if each == version]
            resources = [
                {"name": plural(kind), "singularName": kind.lower(), "kind": kind, "verbs": _VERBS,
                 "namespaced": kind not in ("Namespace", "Node")}
                for kind in kinds
            ]  # fmt: skip
            return {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
    return None


def _root(version: str) -> str:
    return f"/apis/{version}" if "/" in version else f"/api/{version}"


def _path_of(version: str, kind: str) -> str:
    return f"{_root(version)}/namespaces/{{namespace}}/{plural(kind)}/{{name}}"


def _patch(version: str, kind: str) -> Document:
    """Return the part of the OpenAPI document that says that the server validates fields itself."""
    group, _, short = version.rpartition("/")
    parameters = [{"name": name, "in": "query"} for name in ("fieldValidation", "dryRun")]
    named = {"group": group, "version": short, "kind": kind}
    return {"patch": {"parameters": parameters, "x-kubernetes-group-version-kind": named}}


class _Refused(Exception):
    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": message}  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cluster: Cluster

    def log_message(self, *args: object) -> None:
        """Say nothing."""

    def answer(self) -> None:
        url = urlsplit(self.path)
        self.cluster.requests.append((self.command, self.path))
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        words = url.path.strip("/").split("/")
        if words[-1] == "exec":
            self.run_in_pod(parse_qs(url.query)["command"])
            return
        try:
            found = discovery(url.path) or self.resource(words, parse_qs(url.query), body)
        except _Refused as refused:
            found = refused.status
        if isinstance(found, str):
            code, content = 200, found.encode()
        else:
            code = found.get("code", 201 if self.command == "POST" else 200)
            content = json.dumps(found).encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/plain" if found == LOG else "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = answer

    def resource(self, words: list[str], query: dict[str, list[str]], body: bytes) -> Document | str:
        """Answer a request for documents. Raises _Refused."""
        version = "/".join(words[1 : 2 if words[0] == "api" else 3])
        if "namespaces" in words[:-2]:
            kind, *rest = words[words.index("namespaces") + 2 :]
        else:
            kind, *rest = words[len(version.split("/")) + 1 :] or [""]
        if (version, kind) not in {(each, plural(name)) for each, name in KINDS}:
            raise _Refused(404, "NotFound", f"the server could not find {self.path}")
        documents = self.cluster.documents
        if rest[1:] == ["log"]:
            return LOG
        if rest[1:]:
            raise _Refused(403, "Forbidden", f"no {rest[1]} here")
        if self.command == "POST":
            return self.write(version, kind, _read(body))
        if not rest:
            return self.listed(version, kind, query)
        (name,) = rest
        if kind == "namespaces":
            return {"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": name}}
        is_applied = "apply-patch" in self.headers.get("Content-Type", "")
        if self.command == "PATCH" and is_applied:
            return self.write(version, kind, _read(body))
        if (kind, name) not in documents:
            raise _Refused(404, "NotFound", f'{kind} "{name}" not found')
        if self.command == "DELETE":
            return documents.pop((kind, name))
        if self.command == "PATCH":
            return self.write(version, kind, merged(documents[kind, name], _read(body)))
        if self.command == "PUT":
            return self.write(version, kind, _read(body))
        return documents[kind, name]

    def write(self, version: str, kind: str, document: Document) -> Document:
        """Keep a document that belongs to the path and is valid. Raises _Refused."""
        document = {key: value for key, value in document.items() if key != "status"}
        if (document["apiVersion"], plural(document["kind"])) != (version, kind):
            raise _Refused(400, "BadRequest", f"{document['apiVersion']} {document['kind']} at {self.path}")
        try:
            if document["kind"] not in _NEVER_STRICT:
                validate(_without_server_fields(document))
        except Exception as error:
            raise _Refused(422, "Invalid", f"{document['kind']} is invalid: {error}") from error
        return self.cluster.keep(document)

    def listed(self, version: str, kind: str, query: dict[str, list[str]]) -> Document | str:
        """Return the documents of a kind that a request selects, or no changes of them."""
        if "watch" in query:
            return ""
        labels = dict(part.split("=", 1) for part in query.get("labelSelector", [""])[0].split(",") if "=" in part)
        names = [part.partition("=")[2] for part in query.get("fieldSelector", [""])[0].split(",") if part.startswith("metadata.name=")]  # fmt: skip
        items = [
            document
            for (each, name), document in sorted(self.cluster.documents.items())
            if each == kind
            and name in (names or [name])
            and labels.items() <= document["metadata"].get("labels", {}).items()
        ]
        (singular,) = (name for each, name in KINDS if (each, plural(name)) == (version, kind))
        return {"kind": f"{singular}List", "apiVersion": version, "metadata": {"resourceVersion": "2"}, "items": items}

    def run_in_pod(self, command: list[str]) -> None:
        """Answer as the pod whose program prints its own command line and ends with 0 (v5.channel.k8s.io)."""
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
        self.send_header("Sec-WebSocket-Protocol", "v5.channel.k8s.io")
        self.end_headers()
        status = json.dumps({"metadata": {}, "status": "Success"}).encode()
        for content in (b"\x01" + " ".join(command).encode() + b"\n", b"\x03" + status):
            self.wfile.write(bytes([0x82, len(content)]) + content)
        self.wfile.write(b"\x88\x02\x03\xe8")
        self.close_connection = True


@contextlib.contextmanager
def running_cluster() -> Iterator[Cluster]:
    """An API server without nodes."""
    cluster = Cluster()
    cluster.keep({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node"}})
    handler = type("Handler", (_Handler,), {"cluster": cluster})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        cluster.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield cluster
        finally:
            server.shutdown()
            thread.join()
