"""Schemas of the custom resources in docker/kubernetes and docker/helm: what jaxserve uses of them, and no other field.

Each is the part of its project's CustomResourceDefinition (2026-08) that the manifests rely on, with its limits. Pod
templates and everything else is validated by the schemas of Kubernetes itself (`kubernetes_validate`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

Schema = Mapping[str, Any]

_LABEL: Final = {"type": "string", "maxLength": 63, "pattern": r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"}
_NAME: Final = {"type": "string", "minLength": 1, "maxLength": 253}
_PORT: Final = {"type": "integer", "minimum": 1, "maximum": 65535}
_COUNT: Final = {"type": "integer", "minimum": 0}
_TEMPLATE: Final = {"type": "object"}


def _object(required: tuple[str, ...], /, **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _list(items: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": items, **limits}


def _resource(spec: Schema) -> Schema:
    metadata = _object(
        ("name",),
        name=_NAME,
        labels={"type": "object", "additionalProperties": _LABEL},
        annotations={"type": "object", "additionalProperties": {"type": "string"}},
    )
    return _object(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"type": "string"},
        kind={"type": "string"},
        metadata=metadata,
        spec=spec,
    )


_INFERENCE_POOL: Final = _object(
    ("selector", "targetPorts"),
    selector=_object(
        ("matchLabels",),
        matchLabels={"type": "object", "additionalProperties": _LABEL, "minProperties": 1, "maxProperties": 64},
    ),
    targetPorts=_list(_object(("number",), number=_PORT), minItems=1, maxItems=8),
    endpointPickerRef=_object(
        ("name", "port"),  # the port is required for a Service
        name=_NAME,
        port=_object(("number",), number=_PORT),
        failureMode={"enum": ["FailOpen", "FailClose"]},
    ),
)
_HTTP_ROUTE: Final = _object(
    ("parentRefs", "rules"),
    parentRefs=_list(_object(("name",), name=_NAME), minItems=1, maxItems=32),
    rules=_list(
        _object(
            ("backendRefs",),
            matches=_list(
                _object(
                    ("path",),
                    path=_object(
                        ("type", "value"),
                        type={"enum": ["Exact", "PathPrefix", "RegularExpression"]},
                        value={"type": "string", "maxLength": 1024, "pattern": "^/"},
                    ),
                ),
                maxItems=64,
            ),
            backendRefs=_list(
                _object(("name",), group={"type": "string", "maxLength": 253}, kind=_LABEL, name=_NAME), maxItems=16
            ),
            timeouts=_object((), request={"type": "string", "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"}),
        ),
        minItems=1,
        maxItems=16,
    ),
)
_LEADER_WORKER_SET: Final = _object(
    ("leaderWorkerTemplate", "startupPolicy"),
    replicas=_COUNT,
    startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
    rolloutStrategy=_object(
        ("type",),
        type={"enum": ["RollingUpdate"]},
        rollingUpdateConfiguration=_object((), maxUnavailable=_COUNT, maxSurge=_COUNT),
    ),
    leaderWorkerTemplate=_object(
        ("workerTemplate",),
        leaderTemplate=_TEMPLATE,
        workerTemplate=_TEMPLATE,
        size={"type": "integer", "minimum": 1},
        restartPolicy={"enum": ["Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
    ),
)
_GROUP_OF_WORKERS: Final = {
    "rayStartParams": {"type": "object", "additionalProperties": {"type": "string"}},
    "template": _TEMPLATE,
}
_RAY_SERVICE: Final = _object(
    ("rayClusterConfig", "serveConfigV2"),
    serveConfigV2={"type": "string"},
    rayClusterDeletionDelaySeconds=_COUNT,
    rayClusterConfig=_object(
        ("headGroupSpec",),
        rayVersion={"type": "string"},
        enableInTreeAutoscaling={"type": "boolean"},
        headGroupSpec=_object(("template",), **_GROUP_OF_WORKERS),
        workerGroupSpecs=_list(
            _object(
                ("groupName", "template", "minReplicas", "maxReplicas"),
                groupName={"type": "string"},
                replicas=_COUNT,
                minReplicas=_COUNT,
                maxReplicas=_COUNT,
                **_GROUP_OF_WORKERS,
            )
        ),
    ),
)

_SERVICE_MONITOR: Final = _object(
    ("selector", "endpoints"),
    selector=_object(("matchLabels",), matchLabels={"type": "object", "additionalProperties": _LABEL}),
    endpoints=_list(
        _object(
            ("port",),
            port=_NAME,
            interval={"type": "string", "pattern": r"^(([0-9]+)(ms|s|m|h))+$"},
            authorization=_object(
                (),
                type={"type": "string"},
                credentials=_object(("name", "key"), name=_NAME, key=_NAME),
            ),
            relabelings=_list(_object((), targetLabel=_NAME, replacement={"type": "string"})),
        ),
        minItems=1,
    ),
)
_TEXTS: Final = {"type": "object", "additionalProperties": {"type": "string"}}
_DURATION: Final = {"type": "string", "pattern": r"^(([0-9]+)(ms|s|m|h|d))+$"}
_PROMETHEUS_RULE: Final = _object(
    ("groups",),
    groups=_list(
        _object(
            ("name", "rules"),
            name=_NAME,
            rules=_list(
                {
                    "oneOf": [
                        _object(
                            ("alert", "expr"),
                            alert=_NAME,
                            expr={"type": "string", "minLength": 1},
                            **{"for": _DURATION},
                            labels=_TEXTS,
                            annotations=_TEXTS,
                        ),
                        _object(("record", "expr"), record=_NAME, expr={"type": "string", "minLength": 1}),
                    ]
                },
                minItems=1,
            ),
        ),
        minItems=1,
    ),
)

SCHEMAS: Final[Mapping[tuple[str, str], Schema]] = {
    ("inference.networking.k8s.io/v1", "InferencePool"): _resource(_INFERENCE_POOL),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): _resource(_HTTP_ROUTE),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): _resource(_LEADER_WORKER_SET),
    ("ray.io/v1", "RayService"): _resource(_RAY_SERVICE),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _resource(_SERVICE_MONITOR),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _resource(_PROMETHEUS_RULE),
}
"""By apiVersion and kind."""
