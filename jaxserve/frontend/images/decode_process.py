"""Decodes images of requests: `python -m jaxserve.frontend.images.decode_process`, started by an API process.

stdin     frames: a DecodeSpec, then DecodeJobs; when it ends, the parent is gone, and this process exits
stdout    a frame with a DecodeReply for every job

Each image is decoded in a child process, forked after the libraries are loaded. The kernel ends a child that takes too much
time or memory, in whatever decoder it is, and the image counts as too costly; a decoder that crashes ends its child only.
"""

from __future__ import annotations

import os
import resource
import selectors
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
from PIL import Image

from jaxserve.config import ImagesConfig
from jaxserve.frontend.images.decode import ImageError, decode_image
from jaxserve.frontend.images.prepared import load_preparer
from jaxserve.frontend.images.protocol import DecodeJob, DecodeReply, DecodeSpec, Frames, PreparedImage, framed

Prepare = Callable[[Image.Image], PreparedImage]

_NICENESS: Final = 5
"""Niceness of the children: running requests have priority."""
_MAX_READ_BYTES: Final = 1 << 20


def decoded(job: DecodeJob, prepare: Prepare, config: ImagesConfig) -> DecodeReply:
    """Return the reply of a job, with the image or the reason why it is rejected."""
    try:
        image = decode_image(job.data, config.max_image_pixels, low_detail=job.low_detail)
        return DecodeReply(job.number, None, prepare(image))
    except ImageError as error:
        return DecodeReply(job.number, str(error))


def start_child(job: DecodeJob, prepare: Prepare, config: ImagesConfig) -> tuple[int, int]:
    """Fork a child for this image; returns the descriptor of its reply, and its process id."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return reader, pid
    try:
        os.nice(_NICENESS)
        signal.setitimer(
            signal.ITIMER_PROF, config.image_decode_timeout
        )  # its signal has no handler and ends the child
        most = _address_space_bytes() + config.image_decode_memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        reply = msgspec.msgpack.encode(decoded(job, prepare, config))
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(reply)
    finally:
        os._exit(0)


def end_child(reader: int, number: int, pid: int, config: ImagesConfig) -> DecodeReply:
    """Return the reply of a child that has ended, or why there is none."""
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    if data:
        try:
            return msgspec.msgpack.decode(data, type=DecodeReply)
        except msgspec.DecodeError:
            pass  # it was ended while it wrote
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        limit = f"{config.image_decode_timeout:g} s of a processor (--image-decode-timeout)"
        return DecodeReply(number, f"decoding the image took more than {limit}")
    limit = f"{config.image_decode_memory >> 20} MiB (--image-decode-memory)"
    return DecodeReply(number, f"decoding the image failed: it is damaged, or needs more than {limit}")


def serve(descriptor: int) -> None:
    """Answer jobs until stdin ends."""
    frames = Frames()
    spec: DecodeSpec | None = None
    prepare: Prepare | None = None
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd != descriptor:
                    selector.unregister(key.fd)
                    assert spec is not None, "jobs come after the spec"
                    number, pid = key.data
                    _send(end_child(key.fd, number, pid, spec.config))
                    continue
                data = os.read(descriptor, _MAX_READ_BYTES)
                if not data:
                    return
                for frame in frames.push(data):
                    if spec is None or prepare is None:
                        spec = msgspec.msgpack.decode(frame, type=DecodeSpec)
                        prepare = load_preparer(Path(spec.model_path), spec.max_patches)
                    else:
                        job = msgspec.msgpack.decode(frame, type=DecodeJob)
                        reader, pid = start_child(job, prepare, spec.config)
                        selector.register(reader, selectors.EVENT_READ, (job.number, pid))


def _send(reply: DecodeReply) -> None:
    sys.stdout.buffer.write(framed(reply))
    sys.stdout.flush()


def _address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C goes to the whole process group, and the parent decides
    serve(sys.stdin.fileno())
