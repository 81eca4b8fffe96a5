"""The loop of a fork server, the main function of `python -m` modules that an API process starts.

stdin     frames: first what the service is made from, then jobs; when it ends, the parent is gone, and this process exits
stdout    a frame with the reply to every job, in the order in which jobs end; an empty one if no child could be started

Each job runs in a child process, forked after the service is loaded. The kernel ends a child that takes too much time or
memory, in whatever code it is. This process stays single-threaded, so that forking is safe.
"""

from __future__ import annotations

import os
import resource
import selectors
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

import msgspec

from jaxserve.forkserver.frames import Frames, framed

Spec = TypeVar("Spec")
Job = TypeVar("Job")

_MAX_READ_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Service(Generic[Job]):
    """The function that runs in the children, and their limits."""

    job_type: type[Job]
    run: Callable[[Job], object]
    """Returns the reply to a job, in a child."""
    reply_without: Callable[[bool], object]
    """Returns the reply for a child that ended without one; the argument is True if it took too much processor time."""
    timeout_s: float
    """Processor seconds of one child."""
    memory: int
    """Bytes of address space that a child may use beside what this process has."""
    niceness: int
    """Added to the priority of the children (`nice`), since running requests come first."""


def serve(load: Callable[[Spec], Service[Job]], spec_type: type[Spec]) -> None:
    """Answer jobs until stdin ends. Contents of frames are MessagePack; that of the first one is the argument of `load`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C goes to the whole process group, and the parent decides
    descriptor = sys.stdin.fileno()
    frames, service = Frames(), None
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd != descriptor:
                    selector.unregister(key.fd)
                    assert service is not None, "jobs come after what the service is made from"
                    sys.stdout.buffer.write(_end_child(service, key.fd, *key.data))
                    sys.stdout.flush()
                    continue
                data = os.read(descriptor, _MAX_READ_BYTES)
                if not data:
                    return
                for number, content in frames.push(data):
                    if service is None:
                        service = load(msgspec.msgpack.decode(content, type=spec_type))
                    elif (child := _start_child(service, number, content)) is not None:
                        reader, pid = child
                        selector.register(reader, selectors.EVENT_READ, (number, pid))
                    else:
                        sys.stdout.buffer.write(framed(number, b""))
                        sys.stdout.flush()


def _start_child(service: Service[Job], number: int, job: bytes) -> tuple[int, int] | None:
    """Fork a child for this job; returns the descriptor of its reply, and its process id; None without room for it."""
    pipe_ends: tuple[int, ...] = ()
    try:
        reader, writer = pipe_ends = os.pipe()
        pid = os.fork()
    except OSError:
        for end in pipe_ends:
            os.close(end)
        return None
    if pid:
        os.close(writer)
        return reader, pid
    try:
        os.nice(service.niceness)
        signal.setitimer(signal.ITIMER_PROF, service.timeout_s)  # its signal has no handler and ends the child
        most = _address_space_bytes() + service.memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        reply = service.run(msgspec.msgpack.decode(job, type=service.job_type))
        frame = framed(number, msgspec.msgpack.encode(reply))
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(frame)
    finally:
        os._exit(0)


def _end_child(service: Service[Job], reader: int, number: int, pid: int) -> bytes:
    """Return the frame of a child that is about to end, or one that says why there is none."""
    with os.fdopen(reader, "rb") as pipe:
        frame = pipe.read()
    _, status = os.waitpid(pid, 0)
    if Frames().push(frame):  # else it was ended before it wrote all
        return frame
    reply = service.reply_without(os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF)
    return framed(number, msgspec.msgpack.encode(reply))


def _address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
