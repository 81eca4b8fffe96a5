"""Step times of one engine on one device, as a table: measured, or estimated by arithmetic, and marked which."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from jaxserve.scheduler.plan import Buckets, StepPlan

TABLES = Path(__file__).with_name("tables")


class EngineShape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of an engine, as its runner and its memory determine them."""

    decode_buckets: tuple[int, ...]
    mixed_buckets: tuple[int, ...]
    max_num_seqs: int
    max_decode_steps: int
    num_kv_blocks: int
    block_size: int
    max_model_len: int

    @property
    def buckets(self) -> Buckets:
        return Buckets(self.decode_buckets, self.mixed_buckets, self.max_num_seqs, self.max_decode_steps)


class ProgramTimes(msgspec.Struct, frozen=True):
    """Coefficients of one program: its seconds are linear in what a step computes."""

    fixed_s: float
    """Seconds of a step of this bucket, before any of the rest."""
    per_token_s: float = 0.0
    """Seconds for each token of the step, padding excluded."""
    per_key_s: float = 0.0
    """Seconds for each key that a row reads once: the lengths of all rows' contexts, summed."""
    per_pair_s: float = 0.0
    """Seconds for each query-key pair of rows with more than one token."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """Amount of work in one step."""

    num_tokens: int
    num_keys: int
    num_pairs: int


class StepTable(msgspec.Struct, frozen=True, kw_only=True):
    """Times of every program of one engine."""

    title: str
    source: Literal["measured", "estimated"]
    method: str
    """One sentence on the origin of the numbers."""
    engine: EngineShape
    programs: dict[str, ProgramTimes]
    """By `kind/bucket`."""

    def seconds(self, plan: StepPlan) -> float:
        """Return the device time of all steps of a call."""
        times = self.programs[f"{plan.kind}/{plan.bucket}"]
        if plan.kind == "decode":
            num_rows = len(plan.num_computed_tokens)
            return decode_seconds(times, num_rows, int(plan.num_computed_tokens.sum()) + num_rows, plan.num_steps)
        work = mixed_work(plan)
        return (
            times.fixed_s
            + work.num_tokens * times.per_token_s
            + work.num_keys * times.per_key_s
            + work.num_pairs * times.per_pair_s
        )


def decode_seconds(times: ProgramTimes, num_rows: int, num_keys: int, num_steps: int) -> float:
    """Return the time of `num_steps` decode steps of the same rows, which read `num_keys` keys in the first of them."""
    all_keys = num_steps * num_keys + num_rows * (num_steps * (num_steps - 1) // 2)
    return num_steps * (times.fixed_s + num_rows * times.per_token_s) + all_keys * times.per_key_s


def mixed_work(plan: StepPlan) -> StepWork:
    """Return the work of one step of any rows."""
    scheduled, computed = plan.num_scheduled_tokens.astype("int64"), plan.num_computed_tokens.astype("int64")
    is_chunk = scheduled > 1
    pairs = (scheduled * computed + scheduled * (scheduled + 1) // 2)[is_chunk]
    return StepWork(len(plan.token_ids), int((scheduled + computed).sum()), int(pairs.sum()))


def load_table(name: str) -> StepTable:
    """Return a table by its name in `tables`, or by its path. Raises FileNotFoundError, msgspec.ValidationError."""
    path = Path(name) if name.endswith(".json") else TABLES / f"{name}.json"
    return msgspec.json.decode(path.read_bytes(), type=StepTable)


def save_table(table: StepTable, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")


def uniform_table(engine: EngineShape, step_s: float) -> StepTable:
    """Return the table of the fake executor: every step takes the same time."""
    names = [f"decode/{size}" for size in engine.decode_buckets] + [f"mixed/{size}" for size in engine.mixed_buckets]
    return StepTable(
        title=f"fake executor, {1000 * step_s:g} ms a step",
        source="measured",
        method="The fake executor sleeps this long in every step.",
        engine=engine,
        programs={name: ProgramTimes(step_s) for name in names},
    )
