"""`jaxserve status`: what a running server does, in one screen."""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from jaxserve.cli.health import check_health, no_answer, opener_of, seconds
from jaxserve.runtime.environment import base_url, environment_api_key


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the address and the key of the server."""
    parser.add_argument("--url", help="base URL of the server (default: from JAXSERVE_HOST and JAXSERVE_PORT)")
    parser.add_argument("--api-key", metavar="KEY", help="key of the server (default: from JAXSERVE_API_KEY)")
    parser.add_argument("--timeout", type=seconds, default=5.0, metavar="SECONDS", help="time-out (default: 5)")


def run(arguments: argparse.Namespace) -> int:
    """Print the state; returns 0 if the server serves requests, else 1."""
    url, opener = base_url(arguments.url), opener_of(arguments.url)
    problem = check_health(f"{url}/live", timeout_s=arguments.timeout, opener=opener)
    if problem is not None:
        print(f"{url}: {problem}. Start one with `jaxserve serve`.", file=sys.stderr)
        return 1
    key = arguments.api_key or environment_api_key()
    try:
        cards = _get(opener, f"{url}/v1/models", key, arguments.timeout)["data"]
        states = {
            name: _get(opener, f"{url}/ui/state?model={quote(name)}", key, arguments.timeout)
            for name in dict.fromkeys(str(card["root"]) for card in cards if card["parent"] is None)
        }
    except urllib.error.HTTPError as error:
        hint = {401: "give the key with --api-key or JAXSERVE_API_KEY", 404: "the server runs with --no-ui"}
        print(f"{url}: answered {error.code}; {hint.get(error.code, 'try again')}", file=sys.stderr)
        error.close()
        return 1
    except (OSError, http.client.HTTPException) as error:
        print(f"{url}: {no_answer(error)}", file=sys.stderr)
        return 1
    except (ValueError, KeyError, TypeError):
        print(f"{url}: not a jaxserve server: /v1/models or /ui/state answered something else", file=sys.stderr)
        return 1
    unhealthy = _health(opener, f"{url}/health", arguments.timeout)
    print("\n".join(status_lines(url, states, [str(card["id"]) for card in cards], unhealthy)))
    return 0 if unhealthy is None else 1


def status_lines(
    url: str, states: Mapping[str, Mapping[str, Any]], names: list[str], unhealthy: str | None
) -> list[str]:
    """Return the screen. states: replies of `/ui/state`, by model. names: all names that requests may use."""
    first = next(iter(states.values()))
    hours, seconds = divmod(int(first["uptime_seconds"]), 3600)
    lines = _table(
        {
            "server": f"{url}, up {hours}:{seconds // 60:02}:{seconds % 60:02}",
            "state": "serving" if unhealthy is None else f"not serving: {unhealthy}",
            "models": ", ".join(names),
        }
    )
    for name, state in states.items():
        lines += ([f"{name}:"] if len(states) > 1 else []) + _table(_engine_rows(state))
    last = [f"  {one['status']} {one['route']} {one['param'] or ''}".rstrip() for one in first["refused"][:3]]
    return lines + (["last refused and failed requests:", *last] if last else [])


def _table(rows: Mapping[str, str]) -> list[str]:
    return [f"{name:<13} {text}" for name, text in rows.items()]


def _engine_rows(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the rows about one engine."""
    numbers, engine = state["numbers"], state["engine"]
    requests = f"{numbers['running']:.0f} running, {numbers['waiting']:.0f} waiting"
    restarts = f"{numbers['engine_restarts']:.0f}"
    if engine is None:
        return {"requests": requests, "engine": "not ready", "restarts": restarts}
    requests += f", at most {engine['max_num_seqs']} at a time"
    devices = f"{engine['num_devices']} x {engine['platform']}"
    compiled = f"{state['compilations'].get('serving', 0):.0f} programs while serving (0 is right)"
    if engine["vector_size"] is not None:
        return {
            "requests": requests,
            "tokens": f"{numbers['prompt_tokens']:,.0f} of texts",
            "engine": f"{devices}, vectors of {engine['vector_size']:,}, texts of up to {engine['max_model_len']:,} tokens",
            "restarts": restarts,
            "times": f"step {_mean(state['times']['device_step'])}",
            "compiled": compiled,
        }
    queries = numbers["prefix_cache_queries"]
    found = f"{numbers['prefix_cache_hits'] / queries:.1%} of prompt tokens found" if queries else "not used yet"
    return {
        "requests": requests,
        "tokens": f"{numbers['prompt_tokens']:,.0f} of prompts, {numbers['generation_tokens']:,.0f} generated",
        "KV pages": f"{numbers['kv_cache_usage']:.1%} in use of {engine['num_kv_blocks']:,}",
        "prefix cache": found,
        "preemptions": f"{numbers['preemptions']:.0f}",
        "engine": f"{devices}, KV {engine['kv_dtype']}, context {engine['max_model_len']:,}",
        "restarts": restarts,
        "times": ", ".join(f"{label} {_mean(state['times'][name])}" for name, label in _TIMES.items()),
        "compiled": compiled,
    }


_TIMES = {"time_to_first_token": "first token", "inter_token_latency": "between tokens", "device_step": "step"}


def describe_health(body: Mapping[str, Any]) -> str:
    """Return the reply of `/health` of a server that serves no requests, in a few words."""
    model = f" {body['model']}" if "model" in body else ""
    text = f"{body['status']}{model}"
    if "phase" in body:
        text += f": {body['phase']} {body['done']}/{body['total']}"
        if body.get("eta_seconds") is not None:
            text += f", about {body['eta_seconds']:.0f} s left"
    return f"{text}: {body['reason']}" if "reason" in body else text


def _health(opener: urllib.request.OpenerDirector, url: str, timeout_s: float) -> str | None:
    """Return None if the server serves requests, else why not."""
    try:
        with opener.open(url, timeout=timeout_s):
            return None
    except urllib.error.HTTPError as error:
        with error:
            try:
                return describe_health(json.load(error))
            except (ValueError, KeyError, TypeError):
                return f"/health answered {error.code}"
    except (OSError, http.client.HTTPException) as error:
        return f"/health gave no answer: {getattr(error, 'reason', error)}"


def _mean(total: Mapping[str, float]) -> str:
    return f"{1000 * total['seconds'] / total['count']:.1f} ms" if total["count"] else "-"


def _get(opener: urllib.request.OpenerDirector, url: str, key: str | None, timeout_s: float) -> Any:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with opener.open(urllib.request.Request(url, headers=headers), timeout=timeout_s) as response:
        return json.load(response)
