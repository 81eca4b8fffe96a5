"""Progress of the start, the time left, and the report of its times."""

from __future__ import annotations

import msgspec

from jaxserve.http.operations.schema import Loading, StartupPhase, StartupProgram
from jaxserve.http.operations.startup import StartupLog, startup_reply, startup_table
from jaxserve.ipc.messages import Ready, StartupProgress
from jaxserve.ipc.report import PhaseSpan, ProgramReport, StartupReport
from jaxserve.tokenizer.tokenizer import Tokenizer
from tests.unit.running_api import MODEL_INFO, running_api

REPORT = StartupReport(
    phases=[PhaseSpan("open", 100.0, 101.0), PhaseSpan("compile", 101.0, 105.0), PhaseSpan("load", 101.5, 103.0)],
    programs=[ProgramReport("mixed/16", "compiled", 3.5), ProgramReport("decode/1", "cache", 0.25)],
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def test_time_left_follows_the_pace_so_far() -> None:
    clock = Clock()
    log = StartupLog(clock)
    assert log.under_way() == Loading("start", 0, 1, None)
    log.note(StartupProgress("compile", 0, 8))
    clock.now_s += 4
    assert log.under_way() == Loading("compile", 0, 8, None)
    log.note(StartupProgress("compile", 2, 8))
    assert log.under_way() == Loading("compile", 2, 8, 12.0)
    log.note(StartupProgress("compile", 8, 8))
    assert log.under_way() == Loading("compile", 8, 8, None)


def test_hosts_join_at_no_pace() -> None:
    clock = Clock()
    log = StartupLog(clock)
    log.note(StartupProgress("hosts", 1, 2))
    clock.now_s += 10
    assert log.under_way() == Loading("hosts", 1, 2, None)


def test_of_phases_that_overlap_the_one_that_takes_longest_is_reported() -> None:
    clock = Clock()
    log = StartupLog(clock)
    log.note(StartupProgress("compile", 0, 4))
    log.note(StartupProgress("load", 0, 100))
    clock.now_s += 1
    log.note(StartupProgress("compile", 1, 4))
    log.note(StartupProgress("load", 50, 100))
    assert log.under_way().phase == "compile"
    log.note(StartupProgress("compile", 4, 4))
    assert log.under_way() == Loading("load", 50, 100, 1.0)


def test_the_report_counts_time_that_phases_share_once() -> None:
    report = startup_reply(REPORT.phases, REPORT)
    assert report.total_seconds == 5.0
    assert report.start == "partly warm"
    assert report.phases[2] == StartupPhase("load", 1.5, 3.0, 1.5)
    assert report.programs[0] == StartupProgram("mixed/16", "compiled", 3.5)


def test_programs_that_are_loaded_after_readiness_make_a_start_no_colder() -> None:
    programs = [ProgramReport("mixed/16", "cache", 0.5), ProgramReport("decode/1", "cache_later", 0.0)]
    warm = StartupReport(phases=REPORT.phases, programs=programs)
    assert startup_reply(warm.phases, warm).start == "warm"
    assert startup_table(warm.phases, warm)[0].startswith(
        "warm start in 5.0 s; 2 of 2 programs from the cache, 1 follow beside requests"
    )
    partly = StartupReport(phases=REPORT.phases, programs=[*programs, ProgramReport("decode/2", "later", 0.0)])
    assert startup_reply(partly.phases, partly).start == "partly warm"


def test_the_table_has_a_line_for_each_phase() -> None:
    head, _, *lines = startup_table(REPORT.phases, REPORT)
    assert head == "partly warm start in 5.0 s; 1 of 2 programs from the cache (its phases: /startup)"
    assert [line.split() for line in lines] == [
        ["open", "model", "0.00", "1.00", "1.00"],
        ["compile", "programs", "1.00", "5.00", "4.00"],
        ["load", "weights", "1.50", "3.00", "1.50"],
    ]


async def test_startup_is_served_while_loading_and_afterwards(tokenizer: Tokenizer) -> None:
    async with running_api(tokenizer, is_ready=False) as api:
        api.engine.say(StartupProgress("compile", 1, 3))
        await api.engine.marks.get()
        async with api.http.get("/startup") as response:
            loading = await response.json()
        assert (loading["status"], loading["phase"], loading["done"]) == ("loading", "compile", 1)
        async with api.http.get("/ready") as response:
            assert response.status == 503
            state = await response.json()
        assert {"phase", "done", "total", "eta_seconds"} < state.keys()
        api.engine.say(Ready(msgspec.structs.replace(MODEL_INFO, startup=REPORT)))
        await api.client.wait_started()
        async with api.http.get("/startup") as response:
            assert (await response.json()) == msgspec.to_builtins(startup_reply(REPORT.phases, REPORT))
