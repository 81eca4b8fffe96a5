"""The application on Ray Serve: replicas with an engine each, and the ingress before them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import ray
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.util import get_current_placement_group
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from jaxserve.apis.routes import ApiStyle
from jaxserve.checkpoint.source import resolve_model
from jaxserve.errors import ConfigError, RequestError
from jaxserve.frontend.tokenization import NUM_THREADS, Tokenization
from jaxserve.http.access import CorsPolicy
from jaxserve.http.app import collect_routes
from jaxserve.http.operations.schema import RoutingState
from jaxserve.http.paths import style_of_path
from jaxserve.ray.access import IngressBodies, IngressKeys, OwnKey
from jaxserve.ray.relay import Relay, error_reply
from jaxserve.ray.request_router import PageRequestRouter, QueuedTokensPolicy
from jaxserve.ray.route_key import NO_PROMPT, PageSize, RouteKeys, response_replica
from jaxserve.ray.server_process import ServerProcess, serve_command
from jaxserve.ray.settings import AppSettings, RaySettings, read_arguments
from jaxserve.ray.wire import HOP_HEADERS, ReplyHead, ReplyPart, WireRequest
from jaxserve.runtime.environment import child_environment
from jaxserve.runtime.ray_hosts import reserve_hosts

_log = logging.getLogger(__name__)

MAX_ONGOING_REQUESTS = 4096
"""Requests that Ray Serve sends to a replica at most; the server's own limits are lower and answered with 429."""


class EngineReplica:
    """One replica: a `jaxserve serve` process with its engine, health, restarts and metrics."""

    async def __init__(self, settings: Mapping[str, Any], command: Sequence[str] | None) -> None:  # type: ignore[misc]
        """settings: arguments of the application. command: starts the server; None: `jaxserve serve` with the settings."""
        self._settings = read_arguments(settings)
        own = self._settings.ray
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        self._claims = contextlib.ExitStack()  # until the actor ends
        server = self._settings.for_replica(self._replica_id, child_environment(), self._claims)
        server |= await _placement(self._settings)
        cluster = ray.get_runtime_context().gcs_address
        with serve_command(server) as serves:
            self._server = await ServerProcess.start(command or serves, server, cluster, own.start_timeout_s)
        self._key = OwnKey(self._settings.config.server)
        self._versions = itertools.count(1)
        self._follower = asyncio.create_task(self._end_with_server())

    async def handle(self, request: WireRequest) -> AsyncIterator[ReplyPart]:
        """Yield the head of the reply and its bytes. If the caller cancels, the server aborts the request."""
        async with contextlib.aclosing(self._server.send(request, self._replica_id)) as parts:
            async for part in parts:
                yield part

    async def check_health(self) -> None:
        """Raise RuntimeError if the server has given up, as its own `/live` says: Ray Serve then replaces the replica."""
        if (ailment := await self._server.ailment()) is not None:
            raise RuntimeError(ailment)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the cached pages for request routers; nothing while the server does not tell."""
        state = await self._server.routing_state(self._key)
        return {} if state is None else {"version": next(self._versions), "pages": state.pages}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load for the autoscaling policy."""
        state = await self._server.routing_state(self._key)
        if state is None:
            return {"queued_tokens": 0.0, "busy_share": 0.0}
        return {"queued_tokens": state.queued_tokens, "busy_share": state.num_sequences / state.max_num_seqs}

    async def _end_with_server(self) -> None:
        """End this actor when its server ends: routers then choose another replica at once, and Ray Serve starts a new one.

        Otherwise the replica, whose requests end at once, would attract more until it has failed several checks of its health.
        """
        _log.error("the server ended with exit code %d: its replica ends", await self._server.wait())
        os._exit(1)

    async def __del__(self) -> None:
        if (server := self.__dict__.get("_server")) is not None:  # its start may have failed
            self._follower.cancel()
            await server.stop(self._settings.ray.drain_timeout_s)


class Ingress:
    """Receives HTTP requests, computes the pages of their prompts, and moves bytes."""

    def __init__(self, settings: Mapping[str, Any], engines: DeploymentHandle) -> None:
        own = read_arguments(settings)
        config = own.config
        self._engines = engines.options(method_name="handle", stream=True)
        tokens = Tokenization(ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenize"))
        path = resolve_model(config.model)
        self._keys = RouteKeys.load(config, path, tokens, own.ray.routing)
        self._routes = {(route.method, route.path): route for route in collect_routes()}
        self._styles = {path: route.style for (_, path), route in self._routes.items() if route.style != ApiStyle()}
        self._access = IngressKeys(config)
        self._cors = CorsPolicy(config.server.cors_allowed_origins)
        self._bodies = IngressBodies(config)
        self._key = OwnKey(config.server)
        self._page_size = PageSize(self._asked_page_size)

    async def __call__(self, http: Request) -> Response:
        """Answer one HTTP request."""
        path, key, body = http.url.path, NO_PROMPT, b""
        if http.method == "POST":  # requests of other methods have neither a body nor a prompt
            try:
                tenant = self._access.check(http.headers)
                async with (
                    contextlib.aclosing(http.stream()) as chunks,
                    self._bodies.read(
                        chunks, http.headers.get("Content-Length"), self._access.shared_name(tenant)
                    ) as body,
                ):
                    key = await self._keys.of(path, body, await self._page_size.get(), tenant)
            except RequestError as error:
                return self._error_response(http, error)
        headers = tuple((name, value) for name, value in http.headers.items() if name.lower() not in HOP_HEADERS)
        target = path + (f"?{http.url.query}" if http.url.query else "")
        request = WireRequest(http.method, target, headers, body, key, stored_at=response_replica(path, body))
        relay = Relay(self._send, request, self._routes.get((http.method, path)), (RayActorError, RayTaskError))
        try:
            head, parts = await relay.open()
        except BaseException:
            await relay.close()
            raise
        if head.is_event_stream:
            return StreamingResponse(_closing(relay, parts), head.status, dict(head.headers))
        content = b"".join([part async for part in parts])
        return Response(content, head.status, dict(head.headers))

    def _error_response(self, http: Request, error: RequestError) -> Response:
        head, body = error_reply(error, style_of_path(http.url.path, self._styles))
        return Response(body, head.status, dict(head.headers) | self._cors.headers(http.headers))

    async def _asked_page_size(self) -> int | None:
        """Return the tokens per page that a replica reports; None if it does not."""
        asked = WireRequest("GET", "/routing", tuple(self._key.headers.items()), b"", NO_PROMPT)
        with contextlib.suppress(RayActorError, RayTaskError):
            head, *body = [part async for part in self._send(asked)]
            assert isinstance(head, ReplyHead), "the first part is the head"
            self._key.note(head.status)
            if head.status == 200:
                text = b"".join(part for part in body if isinstance(part, bytes))
                return msgspec.json.decode(text, type=RoutingState).block_size
        return None

    async def _send(self, request: WireRequest) -> AsyncGenerator[ReplyPart, None]:
        """Yield what the replica of the router's choice answers. Ending early cancels the request there."""
        reply = self._engines.remote(request)
        try:
            async for part in reply:
                yield part
        finally:
            reply.cancel()


async def _closing(relay: Relay, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        async for part in parts:
            yield part
    finally:
        await relay.close()


def app(arguments: Mapping[str, Any]) -> serve.Application:
    """Return the application for `serve run jaxserve.ray:app NAME=VALUE ...`, or for `args` of a Serve config file.

    Raises ConfigError with one line for an argument that is unknown or wrong.
    """
    return build(arguments)


def build(arguments: Mapping[str, Any], command: Sequence[str] | None = None) -> serve.Application:
    """Return the application. command: starts the server of a replica, which announces its URL; None: `jaxserve serve`."""
    settings = read_arguments(arguments)
    if settings.config.parallel.replicas != 1:
        raise ConfigError("replicas: Ray Serve starts them, each with one engine")
    given, own = dict(arguments), settings.ray
    engines = serve.deployment(EngineReplica).options(
        name="engine",
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        health_check_period_s=5,
        health_check_timeout_s=15,
        graceful_shutdown_timeout_s=own.drain_timeout_s,
        ray_actor_options=settings.actor_options,
        **settings.host_reservation,
        request_router_config=RequestRouterConfig(
            request_router_class=PageRequestRouter,
            request_router_kwargs={"routing": own.routing, "max_imbalance_tokens": own.max_imbalance_tokens},
            request_routing_stats_period_s=own.routing_stats_period_s,
        ),
        **_scale(settings),
    )
    ingress = serve.deployment(Ingress).options(
        name="ingress",
        num_replicas=own.ingress_replicas,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        graceful_shutdown_timeout_s=own.drain_timeout_s,
        ray_actor_options={"num_cpus": 0.1},
    )
    return ingress.bind(given, engines.bind(given, None if command is None else list(command)))


async def _placement(settings: AppSettings) -> dict[str, str]:
    """Return the settings that tell the server of this actor where its other hosts are; nothing without such hosts."""
    if settings.config.hosts.num_hosts == 1:
        return {}
    if settings.ray.tpu_slice:
        return {"placement_group": await asyncio.to_thread(reserve_hosts, settings.config)}
    return {"placement_group": get_current_placement_group().id.hex()}


def _scale(settings: AppSettings) -> dict[str, Any]:
    own: RaySettings = settings.ray
    if own.max_replicas is None:
        return {"num_replicas": own.replicas}
    policy = AutoscalingPolicy(
        policy_function=QueuedTokensPolicy, policy_kwargs={"target_queued_tokens": own.target_queued_tokens}
    )
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=own.min_replicas or own.replicas,
            initial_replicas=max(own.replicas, own.min_replicas or 1),
            max_replicas=own.max_replicas,
            policy=policy,
        )
    }
