"""Members of an engine: the hosts that may join, and those that count as lost."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.executor.hosts.agreement import difference, shared_settings
from jaxserve.executor.hosts.members import HostLostError, Members, RefusedError
from jaxserve.executor.hosts.messages import TO_LEADER, TO_WORKER, Join, Refused
from jaxserve.runtime.environment import load_config
from jaxserve.runtime.settings import BY_NAME
from tests.e2e.http_server import TOKENIZER

SETTINGS = {"jax": "1", "--max-num-seqs": "4"}


def join(rank: int = 1, **changes: Any) -> Join:
    fields = {
        "host_id": f"host-{rank}",
        "incarnation": "first",
        "host_name": "node",
        "shared_settings": SETTINGS,
    } | changes
    return Join(rank, **fields)


def complete(num_hosts: int = 2) -> Members:
    """The members of an engine that has begun."""
    members = Members(num_hosts, SETTINGS)
    for rank in range(1, num_hosts):
        members.join(str(rank).encode(), join(rank))
    members.is_closed = True
    return members


def test_members_are_complete_once_every_other_host_has_joined() -> None:
    members = Members(3, SETTINGS)
    members.join(b"b", join(2))
    assert (members.is_complete, members.missing) == (False, "host 1")
    members.join(b"a", join(1))
    assert members.is_complete
    assert [member.identity for member in members.all] == [b"a", b"b"]


@pytest.mark.parametrize(
    ("request_to_join", "line"),
    [
        (join(shared_settings=SETTINGS | {"jax": "2"}), r"host 1 \(node\) differs from host 0: jax: 2 there, 1 here"),
        (join(2), r"host 2 \(node\): --host-rank must be between 1 and 1"),
        (join(0), r"host 0 \(node\): --host-rank must be between 1 and 1"),
    ],
)
def test_a_host_that_differs_is_refused_with_what_differs(request_to_join: Join, line: str) -> None:
    with pytest.raises(RefusedError, match=line):
        Members(2, SETTINGS).join(b"x", request_to_join)


@pytest.mark.parametrize(
    "flags",
    [{"block_size": 8}, {"max_num_seqs": 2}, {"kv_cache_dtype": "int8"}, {"host_timeout": 60}, {"shutdown_timeout": 5}],
    ids=str,
)
def test_settings_that_hosts_must_share_are_compared(flags: dict[str, Any]) -> None:
    common = {"model": str(TOKENIZER), "tensor_parallel_size": 2, "num_hosts": 2, "coordinator": "10.0.0.1:7600"}
    here, there = (shared_settings(load_config(flags=common | {"host_rank": rank} | more, environ={})) for rank, more in ((0, {}), (1, flags)))  # fmt: skip
    (name,) = flags
    assert BY_NAME[name].flag in str(difference("host 1", there, here))
    assert difference("host 1", here, here) is None


def test_a_host_of_any_version_can_read_what_another_one_asks_and_why_it_is_refused() -> None:
    """A protocol that changes these two messages would make hosts wait for each other instead of refusing."""
    asked = b"\x96\xa4Join\x01\xa6host-1\xa5first\xa4node\x81\xa8protocol\xa3999"
    message = TO_LEADER.decode(asked)
    assert message == join(shared_settings={"protocol": "999"})
    assert isinstance(message, Join)
    with pytest.raises(RefusedError, match=r"differs from host 0: protocol: 999 there, 1 here"):
        Members(2, {"protocol": "1"}).join(b"x", message)
    assert TO_LEADER.decode(b"\x97" + asked[1:] + b"\xa4more") == message, "a later version may have more fields"
    assert TO_WORKER.decode(b"\x92\xa7Refused\xa3why") == Refused("why")


@pytest.mark.parametrize("is_closed", [False, True])
def test_two_hosts_with_one_rank_are_refused_before_and_after_the_start(is_closed: bool) -> None:
    members, other = Members(3, SETTINGS), join(host_id="another", incarnation="other", host_name="other")
    members.join(b"a", join())
    members.join(b"b", other)
    members.is_closed = is_closed
    members.join(b"b", other)  # repeated before it was answered
    with pytest.raises(RefusedError, match="two hosts have --host-rank 1: other and node"):
        members.join(b"a", join())


def test_a_host_that_is_started_again_replaces_the_one_before_while_others_are_awaited() -> None:
    """Its machine or container was started again, so that nothing remembers the host's identity."""
    members = Members(3, SETTINGS)
    members.join(b"a", join())
    members.join(b"b", join(host_id="restarted", incarnation="second"))
    assert members.find(b"a") is None and members.find(b"b") is not None
    members.join(b"c", join(2))
    assert [member.identity for member in members.all] == [b"b", b"c"]


def test_a_worker_that_is_started_again_replaces_the_one_before_until_the_engine_begins() -> None:
    members = Members(2, SETTINGS)
    members.join(b"a", join())
    members.join(b"b", join(incarnation="second"))
    assert members.find(b"a") is None and members.find(b"b") is not None
    members.is_closed = True
    members.join(b"b", join(incarnation="second"))  # repeated before it was answered
    with pytest.raises(HostLostError, match=r"host 1 \(node\) was started again"):
        members.join(b"c", join(incarnation="third"))


def test_a_silent_host_is_lost_after_the_last_beat_it_may_miss() -> None:
    members = complete(3)
    for _ in range(5):
        members.beat(5, 0.5)
    heard = members.find(b"2")
    assert heard is not None
    heard.num_missed = 0
    with pytest.raises(HostLostError, match=r"host 1 \(node\) has been silent for 2.5 s"):
        members.beat(5, 0.5)
