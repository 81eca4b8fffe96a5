"""Time a router's choices: `python -m benchmarks.routing [--replicas 4] [--pages 20000] [--tokens 2000]`.

Replicas report random pages, and every other prompt begins with pages that one of them holds. Prints the median and the
99th percentile of a choice by each policy, and of hashing a prompt.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from jaxserve.routing.replica import ReplicaId
from jaxserve.routing.request import RouteRequest, page_hashes
from jaxserve.routing.router import POLICY_NAMES, Router, make_policy
from jaxserve.types import BlockHash

PAGE_TOKENS = 16
NUM_CHOICES = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--pages", type=int, default=20_000, help="reported pages of each replica")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of a prompt")
    words = parser.parse_args()
    rng = random.Random(0)
    prompts = [np.array([rng.randrange(50_000) for _ in range(words.tokens)], np.int32) for _ in range(64)]
    tell("hashing a prompt", [timed(partial(page_hashes, prompt, PAGE_TOKENS)) for prompt in prompts * 4])
    requests = [
        RouteRequest(num_prompt_tokens=len(prompt), num_output_tokens=128, pages=page_hashes(prompt, PAGE_TOKENS))
        for prompt in prompts
    ]
    for name in POLICY_NAMES:
        router = Router(make_policy(name), map(ReplicaId, map(str, range(words.replicas))), sends_snapshots=True)
        for number, replica in enumerate(router.replicas.values()):
            known = [page for request in requests[number :: 2 * words.replicas] for page in request.pages[:60]]
            others = [BlockHash(rng.randbytes(32)) for _ in range(words.pages - len(known))]
            replica.pages.replace([*known, *others])
        chosen = [rng.choice(requests) for _ in range(NUM_CHOICES)]
        tell(f"choice by {name}", [timed(partial(choose, router, each)) for each in chosen])


def choose(router: Router, request: RouteRequest) -> None:
    """Route a request, and end it."""
    router.route(request).end()


def timed(work: Callable[[], object]) -> float:
    """Return the seconds of `work`."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def tell(name: str, seconds: list[float]) -> None:
    p99 = statistics.quantiles(seconds, n=100)[98]
    print(f"{name:24} median {1e3 * statistics.median(seconds):.3f} ms, p99 {1e3 * p99:.3f} ms")


if __name__ == "__main__":
    main()
