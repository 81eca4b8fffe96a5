"""Keys as records: limits, priorities, salts and usage of each."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError, InvalidRequestError, RateLimitError
from jaxserve.http.api_keys import key_records
from jaxserve.metrics import Metrics
from jaxserve.tenants import KeyRecord, Tenant


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def tenant(num_processes: int = 1, **fields: Any) -> tuple[Tenant, Metrics, Clock]:
    metrics, clock = Metrics("tiny"), Clock()
    return Tenant(KeyRecord(key="k", name="team", **fields), metrics, num_processes, clock), metrics, clock


def test_requests_at_the_same_time_are_limited_and_a_place_comes_back() -> None:
    team, metrics, _ = tenant(max_concurrent_requests=2)
    with team.admitted():
        with team.admitted(), pytest.raises(RateLimitError, match="at most 2 requests may run"), team.admitted():
            pass
        with team.admitted():
            pass
    assert metrics.value("key_rejections", key="team", reason="concurrent") == 1
    assert metrics.value("key_requests", key="team") == 3


def test_requests_a_minute_are_refilled_and_the_wait_is_reported() -> None:
    team, _, clock = tenant(requests_per_minute=6)
    for _ in range(6):
        with team.admitted():
            pass
    with pytest.raises(RateLimitError, match="at most 6 requests a minute") as caught, team.admitted():
        pass
    assert caught.value.retry_after_s == 10
    clock.now_s += 10.0
    with team.admitted():
        pass
    with pytest.raises(RateLimitError), team.admitted():
        pass


def test_tokens_a_minute_count_when_requests_end() -> None:
    team, metrics, clock = tenant(tokens_per_minute=60)
    with team.admitted():
        team.use(100, 20)
    with pytest.raises(RateLimitError, match="at most 60 tokens a minute") as caught, team.admitted():
        pass
    assert caught.value.retry_after_s == 61
    clock.now_s += 61.0
    with team.admitted():
        pass
    assert metrics.value("key_prompt_tokens", key="team") == 100
    assert metrics.value("key_generation_tokens", key="team") == 20


def test_processes_divide_a_limit() -> None:
    team, _, _ = tenant(num_processes=2, max_concurrent_requests=3)
    with contextlib.ExitStack() as stack:
        stack.enter_context(team.admitted())
        stack.enter_context(team.admitted())
        with pytest.raises(RateLimitError), team.admitted():
            pass


def test_priority_and_salt_are_those_of_the_key() -> None:
    team, _, _ = tenant(highest_priority=-1)
    assert [team.priority(given) for given in (-1, 0, 7, None)] == [-1, 0, 7, 0]
    with pytest.raises(InvalidRequestError, match="must be at least -1 with this API key, got -2"):
        team.priority(-2)
    assert team.salt(None) != team.salt("x") and "team" in str(team.salt(None))
    assert tenant()[0].salt("x") == team.salt("x"), "the same in all API processes"
    assert Tenant(KeyRecord(key="other", name="team"), Metrics("tiny")).salt("x") != team.salt("x"), (
        "names can be guessed"
    )
    assert tenant(shares_cache=True)[0].salt(None) is None
    plain = Tenant(KeyRecord(key="k"), Metrics("tiny"))
    assert (plain.priority(-(2**31)), plain.priority(None)) == (-(2**31), 0)
    assert plain.salt("x") == "x"


def test_a_request_without_a_priority_gets_one_that_its_key_may_have() -> None:
    team, _, _ = tenant(highest_priority=5)
    assert (team.priority(None), team.priority(5)) == (5, 5)
    with pytest.raises(InvalidRequestError, match="must be at least 5 with this API key, got 0"):
        team.priority(0)


RECORDS = """
- {key: one, name: team a, tokens_per_minute: 100}
- {key: two, name: operator, is_operator: true}
"""


def test_records_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(RECORDS)
    records = key_records(ServerConfig(api_key="plain", api_key_file=str(file)))
    assert [(record.key, record.name) for record in records] == [("plain", ""), ("one", "team a"), ("two", "operator")]
    assert records[1].tokens_per_minute == 100 and records[2].is_operator


def test_records_are_read_as_the_file_has_them(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(
        "- {key: 0012, name: off, tokens_per_minute: 010, requests_per_minute: 1_000, is_operator: yes, shares_cache: Off}\n"
        "- {key: 2024-13-45, name: 1.10, highest_priority: -5, max_concurrent_requests: null}\n"
    )
    assert key_records(ServerConfig(api_key_file=str(file))) == [
        KeyRecord(key="0012", name="off", tokens_per_minute=10, requests_per_minute=1000, is_operator=True),
        KeyRecord(key="2024-13-45", name="1.10", highest_priority=-5),
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("- {key: null, name: a}", "Expected `str`, got `null`"),
        ("- {key: one, name: a, tokens_per_minute: many}", "Expected `int | null`, got `str`"),
        ("- {key: one, name: a, is_operator: 2}", "Expected `bool`, got `str`"),
        ("one", "Expected `array`, got `str`"),
        ("- {key: one}", "each with `key` and `name`"),
        ("[]", "each with `key` and `name`"),
        ("- {key: one, name: a, tokens: 5}", "unknown field `tokens`"),
        ("- {key: one, name: a}\n- {key: two, name: a}", "two keys have the same name"),
        ("- {key: one, name: a, tokens_per_minute: 0}", "tokens_per_minute of 'a' must be at least 1, got 0"),
        ("{", "not YAML"),
    ],
)
def test_a_wrong_record_is_one_line_without_the_key(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text.replace("one", "sk-secret"))
    with pytest.raises(ConfigError, match=reason) as caught:
        key_records(ServerConfig(api_key_file=str(file)))
    assert "sk-secret" not in str(caught.value) and "\n" not in str(caught.value)
