"""The verdict of a soak counts every reply that no kill explains, and growth, as faults."""

from __future__ import annotations

import subprocess
from typing import cast

import pytest

from benchmarks.soak.__main__ import GRACE_S, Soak
from benchmarks.soak.picture import Kill, Sample
from benchmarks.soak.processes import Role, Usage
from benchmarks.soak.traffic import Ended, Outcome, stream_outcome

WHOLE = 'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        (WHOLE, "ok"),
        (
            'data: {"choices": []}\n\ndata: {"error": {"message": "The engine has died."}}\n\ndata: [DONE]\n\n',
            "error event",
        ),
        (WHOLE.removesuffix("data: [DONE]\n\n"), "cut"),
        ("", "cut"),
    ],
)
def test_a_stream_ends_whole_with_an_error_or_not_at_all(text: str, outcome: Outcome) -> None:
    assert stream_outcome(text)[0] == outcome


def soak(*ended: Ended, kills: list[Kill], growing: Role | None = None) -> Soak:
    """Return a soak of 30 minutes; one role may need 3 MiB more each minute."""
    run = Soak(cast("subprocess.Popen[str]", None), "http://localhost")
    run.began_s, run.kills, run.traffic.ended = 0.0, kills, list(ended)
    roles: tuple[Role, ...] = ("supervisor", "api", "engine")
    for minute in range(31):
        usages = [Usage(n, role, (100 + 3 * minute * (role == growing)) << 20, 20, 8) for n, role in enumerate(roles)]
        run.samples.append(Sample(60.0 * minute, usages, 2))
    return run


@pytest.mark.parametrize(
    ("outcome", "began_s", "ended_s", "is_fault"),
    [
        ("ok", 0, 1, False),
        ("left", 0, 1, False),
        ("busy", 0, 1, False),
        ("silent", 99, 219, True),
        ("wrong", 99, 101, True),
        ("error event", 99, 101, False),
        ("refused", 104, 105, False),
        ("refused", 110 + GRACE_S, 120, True),
        ("error event", 97, 99, True),
        ("cut", 99, 101, True),  # an engine's death cuts no connection
        ("cut", 499, 501, False),
    ],
)
def test_only_a_kill_explains_a_reply_that_is_not_whole(
    outcome: Outcome, began_s: float, ended_s: float, is_fault: bool
) -> None:
    kills = [Kill(100, "engine", back_s=110), Kill(500, "api", back_s=501)]
    assert bool(soak(Ended("chat", outcome, began_s, ended_s), kills=kills).faults(compiled=0)) is is_fault


def test_programs_that_are_compiled_and_memory_that_grows_are_faults() -> None:
    assert soak(kills=[]).faults(compiled=0) == []
    assert soak(kills=[]).faults(compiled=2) == ["2 programs were compiled while serving"]
    (fault,) = soak(kills=[], growing="engine").faults(compiled=0)
    assert fault.startswith("engine: 150,")
