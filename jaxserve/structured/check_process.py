"""Checks grammars of requests: `python -m jaxserve.structured.check_process`, started by an API process.

stdin     lines: a CheckSpec, then CheckRequests; when it ends, the parent is gone, and this process exits
stdout    a CheckReply for every request

Each grammar is checked in a child process, forked after the vocabulary is loaded: the child builds its matcher and its
first mask. The kernel ends a child that takes too much time or memory, in whatever code it is, and the grammar counts as
too costly. This process stays single-threaded, so that forking is safe.
"""

from __future__ import annotations

import os
import resource
import selectors
import signal
import sys
from pathlib import Path
from typing import Final

import msgspec
from llguidance import LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from jaxserve.config import StructuredConfig
from jaxserve.ipc.messages import Grammar
from jaxserve.structured.compiling import GrammarError, load_ll_tokenizer, new_matcher
from jaxserve.structured.protocol import CheckReply, CheckRequest, CheckSpec

_MAX_ERROR_CHARS: Final = 500
_NICENESS: Final = 10
"""Niceness of the children: running requests have priority."""
_FINE: Final = b"fine"
_MAX_CONVERTED_BYTES: Final = 1 << 19
"""Largest converted grammar in JSON: its line must fit in the reader's buffer."""


def converted(grammar: Grammar) -> tuple[Grammar, str | None]:
    """Return a grammar in llama.cpp's format (GBNF) in Lark's, or why it cannot be read."""
    try:
        text = gbnf_to_lark(grammar.text)
    except RecursionError:
        return grammar, "the GBNF grammar is nested too deeply"
    except Exception as error:  # llguidance's converter raises Exception itself
        return grammar, f"the GBNF grammar cannot be read: {error}"[:_MAX_ERROR_CHARS]
    if len(msgspec.json.encode(text)) > _MAX_CONVERTED_BYTES:
        return grammar, f"the GBNF grammar has more than {_MAX_CONVERTED_BYTES} bytes in Lark's form"
    return msgspec.structs.replace(grammar, kind="lark", text=text), None


def check_grammar(grammar: Grammar, tokenizer: LLTokenizer, config: StructuredConfig) -> str | None:
    """Return why the grammar cannot be followed, or None."""
    try:
        matcher = new_matcher(grammar, tokenizer, config)
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        if not any(mask) and not matcher.is_stopped():
            raise GrammarError("it allows no text at all")
    except GrammarError as error:
        return _reason(str(error))
    return None


def _reason(text: str) -> str:
    if "look-around" in text:
        return (
            "look-around such as (?=...) and (?!...) is not supported in patterns: remove the pattern and "
            "check the reply, or write it without"
        )
    return text.strip()[:_MAX_ERROR_CHARS] or "it is not valid"


def start_check(request: CheckRequest, tokenizer: LLTokenizer, config: StructuredConfig) -> tuple[int, int]:
    """Fork a child for this grammar; returns the descriptor of its answer, and its process id."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return reader, pid
    try:
        os.nice(_NICENESS)
        signal.setitimer(signal.ITIMER_PROF, config.grammar_timeout)  # its signal has no handler and ends the child
        most = _address_space_bytes() + config.grammar_memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        grammar, error = request.grammar, None
        if grammar.kind == "gbnf":
            grammar, error = converted(grammar)
        error = error or check_grammar(grammar, tokenizer, config)
        answer = _FINE + (grammar.text.encode() if request.grammar.kind == "gbnf" else b"")
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(answer if error is None else b"!" + error.encode())
    finally:
        os._exit(0)


def end_check(reader: int, number: int, pid: int, config: StructuredConfig) -> CheckReply:
    """Return the reply of a child that has ended."""
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    if text.startswith(_FINE):
        return CheckReply(number, None, text.removeprefix(_FINE).decode() or None)
    if text:
        return CheckReply(number, text[1:].decode())
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return CheckReply(
            number, f"its check took more than {config.grammar_timeout:g} s of a processor (--grammar-timeout)"
        )
    limit = f"{config.grammar_memory >> 20} MiB (--grammar-memory)"
    return CheckReply(number, f"its check failed: it needs more than {limit}, or is nested too deeply")


def serve(descriptor: int) -> None:
    """Answer requests until stdin ends."""
    pending = bytearray()
    spec: CheckSpec | None = None
    tokenizer: LLTokenizer | None = None
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd != descriptor:
                    selector.unregister(key.fd)
                    assert spec is not None
                    number, pid = key.data
                    _send(end_check(key.fd, number, pid, spec.config))
                    continue
                data = os.read(descriptor, 1 << 16)
                if not data:
                    return
                pending += data
                *lines, rest = pending.split(b"\n")
                pending = bytearray(rest)
                for line in lines:
                    if spec is None or tokenizer is None:
                        spec = msgspec.json.decode(line, type=CheckSpec)
                        tokenizer = load_ll_tokenizer(Path(spec.model_path))
                    else:
                        request = msgspec.json.decode(line, type=CheckRequest)
                        reader, pid = start_check(request, tokenizer, spec.config)
                        selector.register(reader, selectors.EVENT_READ, (request.number, pid))


def _send(reply: CheckReply) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
    sys.stdout.flush()


def _address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C goes to the whole process group, and the parent decides
    serve(sys.stdin.fileno())
