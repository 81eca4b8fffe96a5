"""Frames: messages are decoded as they were encoded, and other frames are rejected."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.ipc import transport
from jaxserve.ipc.messages import (
    Abort,
    AddRequest,
    Command,
    CommandDone,
    ErrorInfo,
    FromEngine,
    Heartbeat,
    Hello,
    ModelInfo,
    PagesChanged,
    Ready,
    RequestOutput,
    StartupFailed,
    StartupProgress,
    StepOutputs,
    ToEngine,
    TokenLogprobs,
)
from jaxserve.ipc.report import PhaseSpan, ProgramReport, StartupReport
from jaxserve.ipc.stats import EngineStats
from jaxserve.ipc.transport import ProtocolError, decode_from_engine, decode_to_engine, encode
from jaxserve.sampling.params import DEFAULTS, EngineSamplingParams
from jaxserve.types import RequestId

ID = RequestId("chatcmpl-1")
STARTUP = StartupReport([PhaseSpan("load", 1.5, 2.5)], [ProgramReport("decode/8", "cache", 0.5)])
STATS = EngineStats(
    1, 2, kv_cache_usage_perc=0.5, bucket_steps={"decode/8": 3}, compilations={"warmup": 4, "serving": 0}
)


@pytest.mark.parametrize(
    "message",
    [
        Hello(),
        AddRequest(ID, [1, 2, 3], EngineSamplingParams(seed=7, stop_token_ids=[5, 6]), priority=-1, cache_salt="a"),
        Abort([ID]),
        Command(3, "start_profile"),
    ],
)
def test_message_to_engine_survives_the_trip(message: ToEngine) -> None:
    # As JSON: empty tuples come back as empty lists.
    assert msgspec.json.encode(decode_to_engine(encode(message))) == msgspec.json.encode(message)


@pytest.mark.parametrize(
    "message",
    [
        StartupProgress("compile", 3, 40, "decode/8"),
        Ready(ModelInfo(100, 64, 9, 16, 4, "float32", "cpu", 1, "0badf00d", STARTUP)),
        PagesChanged([b"\x00" * 32], [b"\xff" * 32]),
        StartupFailed("no such file: model.gguf"),
        Heartbeat(STATS),
        CommandDone(3, ErrorInfo("InvalidRequestError", "no")),
        StepOutputs(
            [
                RequestOutput(ID, [4], [TokenLogprobs(-0.5, [4, 9], [-0.5, float("-inf")])], "stop", 4, 16),
                RequestOutput(ID, [], None, "error", error=ErrorInfo("InternalError", "gone", None, None)),
            ],
            STATS,
        ),
    ],
)
def test_message_from_engine_survives_the_trip(message: FromEngine) -> None:
    assert decode_from_engine(encode(message)) == message


def test_whole_numbers_stay_whole_beside_others() -> None:
    defaults = {"top_k": 20, "temperature": 1.0}
    model_info = ModelInfo(100, 64, 9, 16, 4, "float32", "cpu", 1, "0badf00d", STARTUP, sampling_defaults=defaults)
    ready = decode_from_engine(encode(Ready(model_info)))
    assert isinstance(ready, Ready)
    assert repr(ready.model_info.sampling_defaults) == repr(defaults)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x80\x04\x95pickle",
        msgspec.msgpack.encode(["Shutdown"]),
        msgspec.msgpack.encode({"type": "Hello"}),
        msgspec.msgpack.encode(["Abort", "not a list"]),
        b"\x92\xa5Abort\x91\xa2\xff\xfe",
        b"\x91" * 100_000,
    ],
)
def test_foreign_frame_is_a_protocol_error_both_ways(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_to_engine(frame)
    with pytest.raises(ProtocolError):
        decode_from_engine(frame)


@given(st.binary(max_size=200))
def test_random_bytes_never_raise_anything_else(frame: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        decode_to_engine(frame)


def test_damaged_add_request_still_has_its_id() -> None:
    frame = msgspec.msgpack.encode(["AddRequest", "r1", [1, 2], {"temperature": 9.0}])
    with pytest.raises(ProtocolError, match="temperature") as caught:
        decode_to_engine(frame)
    assert caught.value.request_id == "r1"


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [name for name, value in DEFAULTS.items() if isinstance(value, float)])
def test_a_float_that_is_no_number_does_not_reach_the_engine(name: str, number: float) -> None:
    """JSON has none of these, MessagePack has: comparisons with NaN must not let it pass."""
    options: dict[str, Any] = {name: number}
    frame = encode(AddRequest(ID, [1], EngineSamplingParams(**options)))
    with pytest.raises(ProtocolError, match=name):
        decode_to_engine(frame)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_bias_that_is_no_number_does_not_reach_the_engine(number: float) -> None:
    frame = encode(AddRequest(ID, [1], EngineSamplingParams(logit_bias={1: number})))
    with pytest.raises(ProtocolError, match="logit_bias"):
        decode_to_engine(frame)


def test_messages_longer_than_the_limit_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = encode(AddRequest(ID, [1] * 1000, EngineSamplingParams()))
    monkeypatch.setattr(transport, "MAX_FRAME_BYTES", 500)
    with pytest.raises(ProtocolError, match="limit is 500"):
        encode(AddRequest(ID, [1] * 1000, EngineSamplingParams()))
    with pytest.raises(ProtocolError, match="limit is 500"):
        decode_to_engine(frame)
