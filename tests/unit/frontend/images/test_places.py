"""Messages that may hold images, and the errors of those that may not."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import pytest

from jaxserve.apis.responses.input import InputItem, read_input
from jaxserve.errors import InvalidRequestError, UnsupportedParameterError
from jaxserve.frontend.messages import ChatMessage, check_messages

URL: Final = "data:image/png;base64,AAAA"
PARTS: Final[list[dict[str, Any]]] = [
    {"type": "text", "text": "Look"},
    {"type": "image_url", "image_url": {"url": URL}},
]


@pytest.mark.parametrize("role", ["user", "tool"])
def test_users_and_tools_show_images(role: str) -> None:
    check_messages([msgspec.convert({"role": role, "content": PARTS, "tool_call_id": "c"}, ChatMessage)])


@pytest.mark.parametrize("role", ["system", "developer", "assistant"])
def test_an_image_in_a_message_of_another_role_is_refused_with_the_roles_that_may_have_one(role: str) -> None:
    reason = (
        rf"'{{}}\[1\]\.type' is '.*': images are read with the role user and in results of tools, not .* role {role}"
    )
    with pytest.raises(UnsupportedParameterError, match=reason.format(r"messages\[0\]\.content")) as caught:
        check_messages([msgspec.convert({"role": role, "content": PARTS}, ChatMessage)])
    assert caught.value.param == "messages[0].content[1].type"
    content = [{"type": "input_text", "text": "Look"}, {"type": "input_image", "image_url": URL}]
    with pytest.raises(UnsupportedParameterError, match=reason.format(r"input\[0\]\.content")) as caught:
        read_input([msgspec.convert({"role": role, "content": content}, InputItem)])
    assert caught.value.param == "input[0].content[1].type"


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "text", "text": "Look", "image_url": {"url": URL}}, "image_url"),
        ({"type": "image_url", "text": "Look", "image_url": {"url": URL}}, "text"),
    ],
)
def test_a_part_with_an_image_and_a_text_is_refused_since_its_type_shows_one_of_them(
    part: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequestError, match="has none: send it as a part of its own") as caught:
        check_messages([msgspec.convert({"role": "user", "content": [part]}, ChatMessage)])
    assert caught.value.param == f"messages[0].content[0].{field}"
