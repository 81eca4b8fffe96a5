"""A fork server for tests: `python -m tests.unit.forkserver.service`. A job is what its child does."""

from __future__ import annotations

import errno
import os
import signal

from jaxserve.forkserver.serve import Service, serve


def load(content: bytes) -> Service[bytes]:
    memory = 256 << 20
    if content == b"full":
        fork = os.fork

        def full_once() -> int:
            os.fork = fork
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

        os.fork = full_once

    def run(job: bytes) -> bytes:
        match job:
            case b"spin":
                while True:
                    pass
            case b"grow":
                return bytes(2 * memory)
            case b"crash":
                os.kill(os.getpid(), signal.SIGSEGV)
        return content + b" " + job

    def reply_without(is_timeout: bool) -> bytes:
        return b"timeout" if is_timeout else b"ended"

    return Service(bytes, run, reply_without, timeout_s=0.05, memory=memory, niceness=1)


if __name__ == "__main__":
    serve(load, bytes)
