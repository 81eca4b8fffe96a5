"""The loop of `jaxserve chat`: a line is a question, or a command if it begins with a slash."""

from __future__ import annotations

import asyncio
import base64
import json
import mimetypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxserve.tools.client import Remote, RemoteError
from jaxserve.tools.terminal.reply import Reply, Screen, receive

PROMPT, MORE_PROMPT = "> ", ". "

Content = str | list[dict[str, Any]]
"""A text, or parts: images and a text."""
Message = dict[str, Any]
"""`{"role": "user", "content": Content}`."""


@dataclass(slots=True)
class Conversation:
    """A system prompt and turns of question and answer; the last answer may be missing."""

    system: str | None = None
    turns: list[Message] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    """Images of the next question, as `data:` URLs."""

    @property
    def messages(self) -> list[Message]:
        """Messages of the next request."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def ask(self, content: Content) -> None:
        """Add a question; images that wait for one become parts of it."""
        if self.images and isinstance(content, str):
            shown = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
            content = [*shown, {"type": "text", "text": content}]
            self.images = []
        self.turns.append({"role": "user", "content": content})

    def answer(self, text: str) -> None:
        self.turns.append({"role": "assistant", "content": text})

    def take_back(self) -> Content | None:
        """Remove the last question with its answer, if any; returns the question."""
        while self.turns:
            message = self.turns.pop()
            if message["role"] == "user":
                question: Content = message["content"]
                return question
        return None

    def save(self, path: Path, model: str) -> None:
        """Write the fields of a request that continues the conversation. Raises OSError."""
        text = json.dumps({"model": model, "messages": self.messages}, indent=2, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")


class LeaveError(Exception):
    """The user ends the chat."""


@dataclass(slots=True)
class Chat:
    """One user, one server, one conversation."""

    remote: Remote
    model: str
    runner: asyncio.Runner
    screen: Screen
    complain: Callable[[str], None]
    """Shows an error."""
    is_verbose: bool = False
    conversation: Conversation = field(default_factory=Conversation)
    _saved: set[Path] = field(default_factory=set)

    def run(self, read_line: Callable[[str], str]) -> None:
        """Run until the input ends. read_line shows a prompt; it raises EOFError for Ctrl-D, KeyboardInterrupt for Ctrl-C."""
        while True:
            try:
                line = read_message(read_line)
                self.take(line)
            except KeyboardInterrupt:
                self.screen.remark("\n(Ctrl-D ends the chat)")
            except RemoteError as error:
                self.complain(str(error))
            except EOFError:
                self.screen.leave_line()
                return
            except LeaveError:
                return

    def take(self, line: str) -> None:
        """Answer one line or run its command. Raises LeaveError, or RemoteError; then the conversation is unchanged."""
        if not line.strip():
            return
        if not line.startswith("/") or line.startswith("//"):
            self.ask(line.removeprefix("/") if line.startswith("//") else line)
            return
        name, _, words = line[1:].strip().partition(" ")
        command = COMMANDS.get(name)
        if command is None:
            self.screen.remark(f"there is no /{name}: /help lists the commands; a message begins with // for /")
        elif (said := command[-1](self, words.strip())) is not None:
            self.screen.remark(said)

    def ask(self, content: Content) -> Reply:
        """Ask, show the reply and keep both in the conversation, also a stopped reply. Raises RemoteError."""
        images = self.conversation.images
        self.conversation.ask(content)
        fields = {"model": self.model, "messages": self.conversation.messages}
        try:
            reply = receive(self.runner, self.remote.stream("/v1/chat/completions", fields), self.screen)
        except RemoteError:
            self.conversation.take_back()
            self.conversation.images = images
            raise
        if reply.text:
            self.conversation.answer(reply.text)
        else:
            self.conversation.take_back()
            self.conversation.images = images
        if self.is_verbose:
            self.screen.remark(f"[{reply.summary()}]")
        elif reply.is_stopped:
            self.screen.remark("[stopped]")
        elif reply.finish_reason == "length":
            self.screen.remark("[cut off by --max-tokens or the model's context]")
        return reply

    def set_system(self, words: str) -> str:
        self.conversation.system = words or None
        return "the system prompt is set" if words else "there is no system prompt any more"

    def save(self, words: str) -> str:
        if not words:
            return "/save FILE"
        try:
            path = Path(words).expanduser()
            if path.exists() and path not in self._saved:
                return f"{path} exists: choose another name"
            self.conversation.save(path, self.model)
        except (OSError, RuntimeError) as error:
            return _problem(words, error)
        self._saved.add(path)
        return f"{len(self.conversation.messages)} messages saved to {path}"

    def add_image(self, words: str) -> str:
        images = self.conversation.images
        if not words:
            images.clear()
            return "no image goes with the next message"
        kind, _ = mimetypes.guess_type(Path(words).name)
        if kind is None or not kind.startswith("image/"):
            return f"{words}: its name does not end as that of an image, such as .png or .jpg"
        try:
            path = Path(words).expanduser()
            content = path.read_bytes()
        except (OSError, RuntimeError) as error:
            return _problem(words, error)
        images.append(f"data:{kind};base64,{base64.b64encode(content).decode()}")
        return f"{path.name} goes with the next message" + (f", as image {len(images)}" if len(images) > 1 else "")

    def reset(self, words: str) -> str:
        self.conversation.turns.clear()
        self.conversation.images.clear()
        return "the conversation begins anew"

    def undo(self, words: str) -> str:
        question = self.conversation.take_back()
        return "there is nothing to undo" if question is None else f"forgotten: {text_of(question)}"

    def regenerate(self, words: str) -> str | None:
        before = [*self.conversation.turns]
        question = self.conversation.take_back()
        if question is None:
            return "there is nothing to regenerate"
        images, self.conversation.images = self.conversation.images, []
        has_answer = False
        try:
            has_answer = bool(self.ask(question).text)
        finally:
            self.conversation.images = images
            if not has_answer:
                self.conversation.turns = before
        return None

    def help(self, words: str) -> str:
        lines = [f"/{name} {words}".ljust(16) + summary for name, (words, summary, _) in COMMANDS.items()]
        return "\n".join([*lines, r"A line that ends with \ goes on with the next one. Ctrl-C stops a reply."])

    def leave(self, words: str) -> None:
        raise LeaveError


COMMANDS: Mapping[str, tuple[str, str, Callable[[Chat, str], str | None]]] = {
    "help": ("", "this list", Chat.help),
    "system": ("TEXT", "set the system prompt, or without TEXT remove it", Chat.set_system),
    "image": ("FILE", "send an image with the next message, or without FILE none", Chat.add_image),
    "regenerate": ("", "ask the last question again", Chat.regenerate),
    "undo": ("", "forget the last question and its reply", Chat.undo),
    "reset": ("", "forget all but the system prompt", Chat.reset),
    "save": ("FILE", "write the conversation as JSON", Chat.save),
    "exit": ("", "end the chat, as Ctrl-D does", Chat.leave),
}
"""Words, summary and function of each command; the function gets the words and returns a line to show."""


def _problem(file: str, error: OSError | RuntimeError) -> str:
    """Return why a file cannot be used. RuntimeError: its `~` stands for no home directory."""
    return f"{file}: {getattr(error, 'strerror', None) or error}"


def text_of(content: Content) -> str:
    """Return the text of a question, with `[image]` for each image."""
    if isinstance(content, str):
        return content
    return " ".join(part.get("text", "[image]") for part in content)


def read_message(read_line: Callable[[str], str]) -> str:
    r"""Read one message: a line, and the next one while it ends with `\`."""
    line = read_line(PROMPT)
    while line.endswith("\\"):
        line = line[:-1] + "\n" + read_line(MORE_PROMPT)
    return line
