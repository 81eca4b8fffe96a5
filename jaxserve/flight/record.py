"""The file of a flight record: the settings of a scheduler, its state at a point in time, and the calls after it.

It is a gzip file with one MessagePack struct. It holds no prompts, no replies and none of their tokens, only

- numbers: lengths, times, slots, pages;
- names of pages instead of their hashes. Equal pages have equal names, which come from a key that is not kept, so that a
  guessed prompt cannot be checked against a file;
- whether a sampled token ended its request, and which stop token or EOS it then was;
- ids of requests, and names of API keys, as in the log.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any, Final

import msgspec

from jaxserve.config import Config, SchedulerConfig
from jaxserve.flight.errors import RecordError
from jaxserve.flight.graph import Node
from jaxserve.ipc.messages import ModelInfo
from jaxserve.kv.states import UNIT_TOKENS
from jaxserve.scheduler.plan import Buckets

SUFFIX: Final = ".flight"
FORM: Final = 1
MAX_BYTES: Final = 1 << 30
"""Size of a record that is read, without compression."""
KEPT_FILES: Final = 8
"""Records in a folder; older ones are removed when one is written."""


class EngineShape(msgspec.Struct, frozen=True):
    """Everything that a scheduler is made from."""

    config: SchedulerConfig
    num_blocks: int
    block_size: int
    max_model_len: int
    enable_prefix_caching: bool
    num_ranks: int
    windows: list[tuple[int, int]]
    num_state_slots: int
    state_unit: int
    decode_buckets: list[int]
    mixed_buckets: list[int]
    max_num_seqs: int
    max_decode_steps: int
    eos_token_ids: list[int]
    vocab_size: int
    has_grammars: bool
    num_drafts: int = 0
    plans_have_drafts: bool = False


def shape_of(config: Config, model_info: ModelInfo, buckets: Buckets, eos_token_ids: frozenset[int]) -> EngineShape:
    """Return what the scheduler of an engine is made from."""
    return EngineShape(
        config=config.scheduler,
        num_blocks=model_info.num_kv_blocks,
        block_size=model_info.block_size,
        max_model_len=model_info.max_model_len,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        num_ranks=config.parallel.data_parallel_size,
        windows=list(model_info.windows),
        num_state_slots=model_info.num_state_slots,
        state_unit=UNIT_TOKENS,
        decode_buckets=list(buckets.decode),
        mixed_buckets=list(buckets.mixed),
        max_num_seqs=buckets.max_num_seqs,
        max_decode_steps=buckets.max_decode_steps,
        eos_token_ids=sorted(eos_token_ids),
        vocab_size=model_info.vocab_size,
        has_grammars=True,
        num_drafts=buckets.num_drafts,
        plans_have_drafts=buckets.plans_have_drafts,
    )


class RecordedCall(msgspec.Struct, frozen=True, array_like=True):
    """One call of the scheduler."""

    kind: str
    value: dict[str, Any]
    times: list[float]
    error: str | None = None


class FlightRecord(msgspec.Struct, frozen=True):
    """The contents of a file."""

    form: int
    version: str
    """The version of jaxserve that wrote it."""
    model: str
    reason: str
    """The occasion: crash, command or signal."""
    time: float
    """When, in seconds since 1970."""
    shape: EngineShape
    chains: list[list[bytes]]
    """Names of each request's pages: first those of requests in `state`, then by arrival."""
    state: list[Node]
    first_step: int
    """Number of the first plan among `calls`, counted from 1 at the engine's start."""
    calls: list[RecordedCall]

    @property
    def num_steps(self) -> int:
        """Plans among the calls."""
        return sum(call.kind == "schedule" and call.value["plan"] is not None for call in self.calls)


def write_record(record: FlightRecord, directory: Path, name: str) -> Path:
    """Write a record for its owner only, whole or not at all, and remove the oldest ones; returns its path.

    Raises OSError.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    data = gzip.compress(msgspec.msgpack.encode(record), compresslevel=1)
    descriptor, temporary = tempfile.mkstemp(prefix=f"{name}{SUFFIX}.", dir=directory)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        path = directory / f"{name}{SUFFIX}"
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    for old in sorted(directory.glob(f"*{SUFFIX}*"))[:-KEPT_FILES]:  # also what a killed process left
        with contextlib.suppress(OSError):
            old.unlink()
    return path


def read_record(path: Path) -> FlightRecord:
    """Return the record in a file. Raises RecordError."""
    try:
        with gzip.open(path) as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise RecordError("it does not exist", path) from None
    except (OSError, EOFError, zlib.error) as error:
        raise RecordError(f"{error}", path) from error
    if len(data) > MAX_BYTES:
        raise RecordError(f"it is larger than {MAX_BYTES >> 20} MiB", path)
    try:
        record = msgspec.msgpack.decode(data, type=FlightRecord)
    except msgspec.DecodeError as error:
        raise RecordError(f"{error}", path) from error
    if record.form != FORM:
        raise RecordError(f"jaxserve {record.version} wrote it in form {record.form}, this version reads {FORM}", path)
    return record
