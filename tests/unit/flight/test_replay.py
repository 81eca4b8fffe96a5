"""Flight records: the real scheduler decides the same again, and every difference is found."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxserve.flight import flight_recorder
from jaxserve.flight.errors import RecordError
from jaxserve.flight.flight_recorder import FlightRecorder
from jaxserve.flight.record import KEPT_FILES, SUFFIX, FlightRecord, read_record, write_record
from jaxserve.flight.recorder import MAX_OVERRUN
from jaxserve.flight.replay import Difference, replay
from jaxserve.ipc.engine_spec import Script
from jaxserve.ipc.messages import ErrorInfo
from jaxserve.scheduler.plan import NO_SLOT
from tests.engine.rig import Rig, add, prompt
from tests.engine.test_grammar_rows import CountingGrammars, counting

REPEATING = Script(cue=11, token_ids=(5, 6, 7, 5, 6, 7, 5, 6, 8, 9, 5, 6, 8, 9, 5, 6, 7, 2, 5, 6, 8, 9, 9, 9))
LOADS: dict[str, dict[str, Any]] = {
    "overlap": {"depth": 1},
    "drafts": {"depth": 1, "num_speculative_tokens": 3, "script": REPEATING},
    "draft model": {"depth": 1, "num_drafts": 3, "num_speculative_tokens": 3, "max_num_seqs": 32},
    "drafts as chunks": {
        "depth": 1,
        "num_speculative_tokens": 3,
        "script": REPEATING,
        "num_drafts": 3,
        "plans_have_drafts": True,
        "num_state_slots": 24,
    },
    "multi-step": {"depth": 1, "max_decode_steps": 8},
    "multi-step, tokens shown": {"depth": 1, "max_decode_steps": 8, "shows_tokens": True},
    "window": {"depth": 1, "windows": ((8, 40),)},
    "states": {"depth": 1, "num_state_slots": 12},
    "ranks": {"depth": 1, "num_ranks": 2, "num_blocks": 66},
    "fcfs": {"depth": 1, "scheduling_policy": "fcfs"},
    "keys": {"depth": 1, "num_keys": 3},
    "grammars": {"depth": 1, "seed": 1, "grammars": CountingGrammars(num_jump_forward=2)},
}


def under_load(
    *, num_turns: int = 250, seed: int = 0, recorded_steps: int = 40, num_keys: int = 1, **options: Any
) -> Rig:
    """Return a rig that was under mixed load, with requests under way: prefix hits, preemptions, aborts and a failed step."""
    chance, has_failed = random.Random(seed), False
    rig = Rig(**{"num_blocks": 40, "recorded_steps": recorded_steps, **options})
    for turn in range(num_turns):
        if len(rig.scheduler.requests) < 12 and chance.random() < 0.4:
            text = [11] * chance.choice([0, 8, 16, 24]) + [
                chance.randrange(3, 100) for _ in range(chance.randint(1, 20))
            ]
            message = add(
                f"r{turn}",
                text,
                max_tokens=chance.randint(1, 40),
                ignore_eos=chance.random() < 0.5,
                stop_token_ids=(7,) if chance.random() < 0.3 else (),
                presence_penalty=chance.choice([0.0, 0.0, 1.0]),
                num_prompt_logprobs=chance.choice([None, None, None, 1]),
                num_top_logprobs=chance.choice([None, None, 2]),
            )
            is_constrained = options.get("grammars") is not None and chance.random() < 0.5
            message = counting(f"r{turn}", chance.randint(3, 60)) if is_constrained else message
            rig.send(msgspec.structs.replace(message, key_name=str(turn % num_keys)))
        if rig.scheduler.requests and chance.random() < 0.05:
            rig.collect(rig.scheduler.abort([chance.choice(list(rig.scheduler.requests))]))
        if turn >= num_turns - 20 and rig.pending and not has_failed:
            has_failed = True
            rig.collect(rig.scheduler.fail(rig.pending[0][0], ErrorInfo("InternalError", "broken")))
            rig.pending.clear()
            rig.executor.lose_state()
        rig.step()
    return rig


@pytest.mark.parametrize("load", LOADS)
def test_the_scheduler_decides_the_same_again(load: str) -> None:
    rig = under_load(**LOADS[load])
    record = rig.record()
    assert record.first_step > 1, "the record begins in the middle"
    assert record.num_steps >= 40
    assert {call.kind for call in record.calls} >= {"add", "schedule", "update", "fail"}
    assert rig.scheduler.take_stats().num_preemptions > 0
    if load == "drafts":
        assert any(slot < 0 for plan in plans(record) for slot in plan["slots"])
    if load == "draft model":
        assert any(plan["kind"] == "speculate" and any(plan["draft_lengths"]) for plan in plans(record))
    if load == "keys":
        assert any(call.kind == "abort" for call in record.calls)
    if load == "grammars":
        assert any(call.value["jumped"] for call in record.calls if call.kind == "poll_grammars")
    assert replay(record) is None


def test_a_record_begins_while_drafts_of_a_model_wait_on_the_device() -> None:
    rig = Rig(depth=1, num_drafts=3, recorded_steps=4)
    rig.send(*(add(str(first), prompt(5, first), max_tokens=80) for first in (3, 4)))
    for _ in range(16):
        rig.step()
    record = rig.record()
    assert record.first_step > 1
    assert plans(record)[0]["draft_lengths"] == [3, 3]
    assert replay(record) is None


def test_tokens_that_are_taken_in_the_middle_of_a_call_are_taken_again() -> None:
    """The record begins in the middle of a call, and requests end in others."""
    rig = Rig(depth=1, max_decode_steps=8, shows_tokens=True, recorded_steps=5)
    rig.send(
        *(add(str(first), prompt(5, first), max_tokens=60 + first, stop_token_ids=(7, 8, 9)) for first in range(3, 9))
    )
    for _ in range(14):
        rig.step()
    record = rig.record()
    assert record.first_step > 1
    assert sum(call.kind == "take_tokens" for call in record.calls) > 10
    assert len(rig.ends) > 1
    assert replay(record) is None


def test_a_record_from_the_start_is_replayed_without_a_captured_state() -> None:
    record = under_load(depth=1, recorded_steps=10_000, num_turns=60).record()
    assert record.first_step == 1
    assert replay(record) is None


@pytest.mark.slow
@pytest.mark.parametrize("load", [pytest.param("overlap", marks=pytest.mark.exhaustive), "draft model", "grammars"])
def test_a_record_that_another_thread_writes_in_the_middle_of_a_call_is_whole(load: str) -> None:
    """Writes and replays a record at every line of the recorder that the engine's thread reaches."""
    rig = under_load(num_turns=12, recorded_steps=2, **LOADS[load])
    differences: list[Difference | None] = []

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.endswith(("flight/recorder.py", "flight/recorded_scheduler.py")):
            return None
        sys.settrace(None)
        differences.append(replay(rig.record()))
        sys.settrace(trace)
        return trace

    rig.send(add("a", prompt(9, 3), max_tokens=2), add("b", prompt(9, 4), max_tokens=2))
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for _ in range(4):  # two segments of the record, and the ends of both requests
            rig.step()
    finally:
        sys.settrace(before)
    assert len(differences) > 100
    assert not any(differences)


def plans(record: FlightRecord) -> list[dict[str, Any]]:
    return [call.value["plan"] for call in record.calls if call.kind == "schedule" and call.value["plan"] is not None]


def first(record: FlightRecord, kind: str, number: int = 0) -> dict[str, Any]:
    return [call.value for call in record.calls if call.kind == kind][number]


def _slot(record: FlightRecord) -> None:
    plans(record)[9]["slots"][0] += 1


def _page(record: FlightRecord) -> None:
    plans(record)[9]["pages"][-1] += 1


def _row(record: FlightRecord) -> None:
    plans(record)[9]["request_ids"].pop()


def _no_plan(record: FlightRecord) -> None:
    calls = [call for call in record.calls if call.kind == "schedule" and call.value["plan"] is not None]
    calls[9].value["plan"] = None


def _prompt(record: FlightRecord) -> None:
    first(record, "add", 1)["num_prompt_tokens"] += 5


def _end(record: FlightRecord) -> None:
    first(record, "add", 1)["sampling"]["max_tokens"] = 1


def _abort(record: FlightRecord) -> None:
    first(record, "abort")["argument"].clear()


@pytest.mark.parametrize("change", [_slot, _page, _row, _no_plan, _prompt, _end, _abort])
def test_a_changed_record_is_found(change: Callable[[FlightRecord], None]) -> None:
    record = under_load(depth=1).record()
    change(record)
    difference = replay(record)
    assert isinstance(difference, Difference)
    if change in (_slot, _page, _row, _no_plan):
        assert difference.step == record.first_step + 9


def test_the_field_that_differs_is_named() -> None:
    record = under_load(depth=1).record()
    plan = plans(record)[3]
    plan["bucket"] *= 2
    text = f"step {record.first_step + 3}: bucket: recorded {plan['bucket']}, replayed {plan['bucket'] // 2}"
    assert str(replay(record)) == text


def test_an_exception_of_the_scheduler_is_raised_again() -> None:
    rig = Rig(recorded_steps=1)
    rig.send(add("a", prompt(20), max_tokens=30))
    for _ in range(5):
        rig.step()
    rig.kv.pool._references[rig.scheduler.running[0].table.blocks[0]] = 0  # a bug
    rig.step()
    rig.step()
    with pytest.raises(RuntimeError, match="released more often"):
        rig.scheduler.abort(["a"])
    record = rig.record()
    assert record.calls[-1].error is not None
    assert replay(record) is None
    record.calls[-1] = msgspec.structs.replace(record.calls[-1], error=None)
    assert "error of abort: recorded None, replayed RuntimeError" in str(replay(record))


def test_no_token_and_no_page_hash_is_in_a_file() -> None:
    secret = [89, 83, 79, 73, 71, 67, 61, 59]
    rig = Rig(depth=1, recorded_steps=3, num_blocks=40, script=Script(cue=secret[-1], token_ids=(97,) * 30))
    for name in "abc":
        rig.run(add(name, secret * 2, max_tokens=6, num_prompt_logprobs=1))
        rig.send(add(name * 2, secret * 2, max_tokens=30))
        rig.step()
    assert rig.recorder is not None
    hashes = [page for segment in rig.recorder.segments for chain in segment.start.chains for page in chain.known]
    assert hashes
    data = msgspec.msgpack.encode(rig.record())
    assert not [page for page in hashes if page in data]
    plain = msgspec.msgpack.decode(data, type=dict)
    assert replay(rig.record()) is None
    numbers = runs_of_numbers(plain)
    assert not [run for run in numbers if any(run[i : i + 2] == secret[:2] for i in range(len(run)))]
    assert not [run for run in numbers if 97 in run and run.count(97) > 2]


def runs_of_numbers(value: Any) -> list[list[int]]:
    """Return every list of numbers in decoded data."""
    if isinstance(value, dict):
        return [run for part in value.values() for run in runs_of_numbers(part)]
    if not isinstance(value, list):
        return []
    own = [part for part in value if isinstance(part, int)]
    return [own, *(run for part in value for run in runs_of_numbers(part))]


def test_memory_is_bounded() -> None:
    rig = Rig(depth=1, recorded_steps=10)
    for number in range(60):
        rig.run(add(f"r{number}", prompt(20, number), max_tokens=12))
    assert rig.recorder is not None
    segments = rig.recorder.segments
    assert len(segments) == 2
    assert all(segment.num_steps <= 11 for segment in segments)
    assert segments[-1].first_step > 500
    rig.recorder._max_bytes = 20_000
    for number in range(20):
        rig.run(add(f"s{number}", prompt(20, number), max_tokens=12))
    assert all(segment.num_bytes < 30_000 for segment in rig.recorder.segments)
    assert replay(rig.record()) is None


def test_memory_is_bounded_while_drafts_are_always_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(depth=1, recorded_steps=10)
    recorder = rig.recorder
    assert recorder is not None
    with_drafts: Any = SimpleNamespace(in_flight=[(SimpleNamespace(slots=np.array([NO_SLOT])), None)])
    begin_step = recorder.begin_step
    monkeypatch.setattr(recorder, "begin_step", lambda scheduler: begin_step(with_drafts))
    for number in range(20):
        rig.run(add(f"r{number}", prompt(20, number), max_tokens=12))
    (overrun,) = recorder.segments
    assert overrun.num_steps > 10 * MAX_OVERRUN and overrun.num_kept is not None
    assert len(overrun.events) < overrun.num_kept + 10
    assert replay(rig.record()) is None, "the steps that were kept"
    monkeypatch.undo()
    rig.run(add("last", prompt(20), max_tokens=4))
    (segment,) = recorder.segments
    assert segment.first_step == overrun.num_steps + 1
    assert replay(rig.record()) is None


def test_an_idle_engine_adds_nothing() -> None:
    rig = Rig(recorded_steps=10)
    rig.run(add("a", prompt(5)))
    assert rig.recorder is not None
    before = len(rig.recorder.segments[-1].events)
    for _ in range(50):
        rig.step()
    assert rig.scheduler.add(add("b", [])) is not None, "a request that is rejected"
    assert len(rig.recorder.segments[-1].events) == before


def test_files_are_private_whole_and_few(tmp_path: Path) -> None:
    record = under_load(num_turns=10).record()
    folder = tmp_path / "flight"
    for number in range(KEPT_FILES + 3):
        path = write_record(record, folder, f"{number:03}")
    assert read_record(path) == record
    assert (folder.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)
    assert [each.name for each in sorted(folder.iterdir())] == [f"{n:03}{SUFFIX}" for n in range(3, KEPT_FILES + 3)]


def test_what_a_killed_process_left_of_a_file_is_removed_like_an_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = under_load(num_turns=10).record()
    with monkeypatch.context() as killed:
        killed.setattr("os.replace", unittest.mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write_record(record, tmp_path, "000")
    assert len(os.listdir(tmp_path)) == 1
    for number in range(1, KEPT_FILES + 1):
        write_record(record, tmp_path, f"{number:03}")
    assert sorted(os.listdir(tmp_path)) == [f"{n:03}{SUFFIX}" for n in range(1, KEPT_FILES + 1)]


def test_pods_with_one_folder_write_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their processes have the same numbers, and an operator may ask all of them within a second."""
    record = under_load(num_turns=10).record()
    monkeypatch.setattr(flight_recorder, "make_record", lambda *arguments, **names: record)
    monkeypatch.setattr(time, "strftime", lambda form, when: "20260101T120000Z")
    unread: Any = None
    for host in ("pod-a", "pod-b"):
        monkeypatch.setattr(socket, "gethostname", lambda name=host: name)
        path = FlightRecorder(unread, unread, "m", str(tmp_path)).write("signal")
        assert path.name == f"20260101T120000Z-{host}-{os.getpid()}-1{SUFFIX}"


def test_a_user_without_a_home_directory_is_asked_for_another_folder() -> None:
    unread: Any = None
    recorder = FlightRecorder(unread, unread, "m", "~nosuchuser/flight")
    with pytest.raises(OSError, match="--flight-recorder-dir"):
        recorder.write("command")


def test_files_that_are_no_records_are_refused_in_one_line(tmp_path: Path) -> None:
    path = write_record(under_load(num_turns=10).record(), tmp_path, "a")
    whole = path.read_bytes()
    for data in (b"", b"text", whole[: len(whole) // 2]):
        path.write_bytes(data)
        with pytest.raises(RecordError, match="cannot be replayed"):
            read_record(path)
    with pytest.raises(RecordError, match="does not exist"):
        read_record(tmp_path / "none")


def test_a_record_with_objects_of_other_classes_is_refused() -> None:
    record = under_load(num_turns=30, recorded_steps=5).record()
    for name in (
        "subprocess:Popen",
        "jaxserve.kv.block_pool:annotations",
        "jaxserve.scheduler.plan:np",
        "jaxserve.kv:x",
    ):
        state = [
            msgspec.structs.replace(node, names=[name, *node.names[1:]]) if node.kind == "object" else node
            for node in record.state
        ]
        with pytest.raises(RecordError, match="unknown class"):
            replay(msgspec.structs.replace(record, state=state))


def test_the_command_answers_0_if_all_steps_are_equal_and_imports_no_jax(tmp_path: Path) -> None:
    record = under_load(depth=1).record()
    path = write_record(record, tmp_path, "a")
    script = "import sys; from jaxserve.cli.main import main; code = main(sys.argv[1:]); "
    script += "assert not {'jax', 'jaxlib'} & set(sys.modules); sys.exit(code)"
    words = [sys.executable, "-c", script, "replay", str(path), "--show", "3"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "first step that differs: 0, all are equal"
    plans(record)[5]["slots"][0] += 1
    write_record(record, tmp_path, "a")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"first difference: step {record.first_step + 5}: slots" in done.stdout
