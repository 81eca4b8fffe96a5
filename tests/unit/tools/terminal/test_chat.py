"""The chat loop with a scripted user and a scripted server."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.tools.client import OutputDelta, RemoteError
from jaxserve.tools.terminal.chat import COMMANDS, Chat, Conversation
from jaxserve.tools.terminal.reply import Screen


class Terminal(io.StringIO):
    """Output that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class ScriptedRemote:
    """Answers the n-th request with `reply n`, or breaks off in the middle with `failures[n]`."""

    def __init__(self) -> None:
        self.sent: list[list[dict[str, str]]] = []
        self.failures: dict[int, BaseException] = {}
        self.stopped: set[int] = set()
        """Requests that Ctrl-C stops before their first token."""

    async def stream(self, endpoint: str, fields: Any) -> AsyncIterator[OutputDelta]:
        assert endpoint == "/v1/chat/completions"
        self.sent.append(list(fields["messages"]))
        if len(self.sent) in self.stopped:
            raise KeyboardInterrupt
        yield OutputDelta(1.0, text="reply ")
        if failure := self.failures.get(len(self.sent)):
            raise failure
        yield OutputDelta(2.0, text=str(len(self.sent)), finish_reason="stop")


class Scene:
    """A chat, what its user types, and what is seen of it."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self.remote, self.output, self.complaints = ScriptedRemote(), Terminal(), list[str]()
        remote: Any = self.remote
        self.chat = Chat(remote, "m", runner, Screen(self.output), self.complaints.append)

    def play(self, *lines: str | type[BaseException]) -> str:
        """Type these lines and end the input; returns what was shown. A class is a key: it is raised."""
        self.left = [*lines, EOFError]

        def read_line(prompt: str) -> str:
            line = self.left.pop(0)
            if isinstance(line, str):
                return line
            raise line

        shown = self.output.tell()
        self.chat.run(read_line)
        return self.output.getvalue()[shown:]


@pytest.fixture
def scene() -> Iterator[Scene]:
    with asyncio.Runner() as runner:
        yield Scene(runner)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_every_question_is_sent_with_what_was_said_before(scene: Scene) -> None:
    assert scene.play("one", "", "two") == "reply 1\nreply 2\n\n"
    assert scene.remote.sent == [[user("one")], [user("one"), assistant("reply 1"), user("two")]]


def test_a_line_that_ends_with_a_backslash_goes_on(scene: Scene) -> None:
    scene.play("one\\", "two\\", "three")
    assert scene.remote.sent == [[user("one\ntwo\nthree")]]


def test_system_prompt_is_set_changed_and_removed(scene: Scene) -> None:
    scene.chat.conversation = Conversation("first")
    scene.play("/reset", "a", "/reset", "/system be brief", "b", "/reset", "/system", "c")
    systems = [[m["content"] for m in sent if m["role"] == "system"] for sent in scene.remote.sent]
    assert systems == [["first"], ["be brief"], []]
    assert [sent[-1] for sent in scene.remote.sent] == [user("a"), user("b"), user("c")]
    assert [len(sent) for sent in scene.remote.sent] == [2, 2, 1]


def test_undo_and_regenerate(scene: Scene) -> None:
    shown = scene.play("/undo", "/regenerate", "one", "two", "/undo", "three", "/regenerate")
    assert "nothing to undo" in shown
    assert "nothing to regenerate" in shown
    assert "forgotten: two" in shown
    assert scene.remote.sent[2:] == [[user("one"), assistant("reply 1"), user("three")]] * 2
    assert scene.chat.conversation.turns[-1] == assistant("reply 4")


def test_ctrl_c_keeps_what_came_and_the_chat(scene: Scene) -> None:
    scene.remote.failures[1] = KeyboardInterrupt()
    assert "[stopped]" in scene.play("one", "go on")
    assert scene.remote.sent[1] == [user("one"), assistant("reply "), user("go on")]


def test_ctrl_c_at_the_prompt_drops_the_line(scene: Scene) -> None:
    assert "Ctrl-D" in scene.play("half of\\", KeyboardInterrupt, "whole")
    assert scene.remote.sent == [[user("whole")]]


@pytest.mark.parametrize("again", ["one", "/regenerate"])
def test_a_failed_question_leaves_the_conversation_as_it_was(scene: Scene, again: str) -> None:
    scene.play("zero")
    scene.remote.failures[2] = RemoteError("500 broken")
    scene.play(again)
    assert scene.complaints == ["500 broken"]
    assert scene.chat.conversation.turns == [user("zero"), assistant("reply 1")]


def test_saved_conversations_can_be_sent_again_and_overwrite_no_strangers(scene: Scene, tmp_path: Path) -> None:
    file, stranger = tmp_path / "chat.json", tmp_path / "thesis.txt"
    stranger.write_text("years of work")
    shown = scene.play("/system be brief", "é", f"/save {file}", "two", f"/save {file}", f"/save {stranger}", "/save")
    assert "5 messages saved" in shown
    assert f"{stranger} exists" in shown
    assert "/save FILE" in shown
    assert stranger.read_text() == "years of work"
    assert json.loads(file.read_text()) == {"model": "m", "messages": scene.chat.conversation.messages}
    assert "No such file" in scene.play(f"/save {tmp_path}/nowhere/chat.json")
    assert "File name too long" in scene.play(f"/save {'x' * 300}")
    assert "home directory" in scene.play("/save ~nosuchuser/chat.json", "/image ~nosuchuser/cat.png")


def test_an_image_goes_with_the_next_message_and_stays_after_a_failure(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(b"cat")
    parts = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,Y2F0"}},
        {"type": "text", "text": "What is it?"},
    ]
    asked = {"role": "user", "content": parts}
    scene.remote.failures[1] = RemoteError("400 too large")
    shown = scene.play(
        f"/image {tmp_path}/cat.png", "What is it?", "What is it?", "Sure?", "/undo", "/regenerate", "/undo"
    )
    assert "cat.png goes with the next message" in shown and "forgotten: [image] What is it?" in shown
    assert scene.remote.sent == [[asked], [asked], [asked, assistant("reply 2"), user("Sure?")], [asked]]
    shown = scene.play(
        f"/image {tmp_path}/dog.png", "/image notes.txt", f"/image {tmp_path}/cat.png", "/image", "text only"
    )
    assert "dog.png: No such file" in shown and "notes.txt: its name does not end as that of an image" in shown
    assert scene.remote.sent[-1] == [user("text only")]


def test_a_stopped_regenerate_keeps_the_answer_and_the_next_image(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(b"cat")
    scene.remote.stopped.add(2)
    scene.play("one", f"/image {tmp_path}/cat.png", "/regenerate")
    assert scene.chat.conversation.turns == [user("one"), assistant("reply 1")]
    scene.play("/regenerate", "two")
    assert scene.remote.sent[1:3] == [[user("one")]] * 2
    parts: Any = scene.remote.sent[3][-1]["content"]
    assert [part["type"] for part in parts] == ["image_url", "text"]


def test_commands_are_listed_and_typos_are_not_sent(scene: Scene) -> None:
    shown = scene.play("/help", "/rest", "//etc is a folder")
    assert all(f"/{name}" in shown for name in COMMANDS)
    assert "there is no /rest" in shown
    assert scene.remote.sent == [[user("/etc is a folder")]]


def test_every_command_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[4] / "docs/chat.md").read_text()
    assert [name for name in COMMANDS if f"`/{name}" not in page] == []


def test_exit_ends_the_chat(scene: Scene) -> None:
    scene.play("/exit", "one")
    assert scene.left == ["one", EOFError]
    assert scene.remote.sent == []
