"""Inputs and outputs of a step program: one packed int32 vector each way; and the functions of a kind of plan, a task.

Both derive from a field table, so that packing (numpy), the shapes to compile for, and unpacking (inside the program)
cannot disagree. One packed array costs about 10 us to pass, eight small ones 50 to 80 us.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.models.skeleton import DecoderSkeleton
from jaxserve.models.vision import ImageTokens
from jaxserve.runner.images.encoder import ImageShape
from jaxserve.runner.page_tables import by_group, table_rows
from jaxserve.runner.state import DeviceState, StateArrays
from jaxserve.sampling.params import COLUMNS, PADDING_ROW, EngineSamplingParams, device_row
from jaxserve.sampling.sampler import Sampled
from jaxserve.scheduler.plan import (
    MAX_STOP_TOKENS,
    NO_IMAGE_ROW,
    NO_SLOT,
    NO_TARGET,
    Buckets,
    EmbedsItem,
    EncodeItem,
    Plan,
    PromptScores,
    StepPlan,
    StepResult,
)
from jaxserve.types import MAX_TOP_LOGPROBS, NULL_BLOCK, ProgramKind, RequestId

A = TypeVar("A", np.ndarray, jax.Array)


@dataclass(frozen=True, slots=True)
class Program:
    """One compiled shape: T tokens, B rows, G tables of M pages a row, up to K steps a call (tokens of a row in a speculative
    step), X slots of running requests, Y slots of recurrent states."""

    kind: ProgramKind
    num_tokens: int  # T
    num_rows: int  # B
    max_pages: int  # M
    num_slots: int  # X
    max_steps: int = 1  # K
    num_tables: int = 1  # G
    num_state_slots: int = 0  # Y, with the zero slot; 0 for a model without recurrent layers
    images: ImageShape | None = None
    """None for a model that reads tokens only."""

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.num_tokens}"

    @property
    def sees_whole_images(self) -> bool:
        """True if tokens of an image may see later ones."""
        return self.kind == "mixed" and self.images is not None and self.images.is_bidirectional


def programs(buckets: Buckets, max_pages: int, num_tables: int = 1, num_state_slots: int = 0) -> tuple[Program, ...]:
    """Return every program of these buckets, largest first: the slowest to compile starts first."""
    num_slots, cache = buckets.max_num_seqs, (num_tables, num_state_slots)
    decode = [
        Program("decode", size, size, max_pages, num_slots, buckets.max_decode_steps, *cache) for size in buckets.decode
    ]
    mixed = [
        Program("mixed", size, buckets.mixed_rows(size), max_pages, num_slots, 1, *cache) for size in buckets.mixed
    ]
    width = 1 + buckets.num_drafts
    speculate = [Program("speculate", size, size, max_pages, num_slots, width, *cache) for size in buckets.speculate]
    return tuple(sorted(decode + mixed + speculate, key=lambda program: -program.num_tokens))


INPUT_FIELDS: Final = {
    "num_decode_rows": "",
    "num_top_logprobs": "",
    "num_steps": "",
    "num_prompt_logprobs": "",
    "tokens": "T",  # UNREAD_TOKEN: the one in the row's slot
    "positions": "T",
    "rows": "T",  # row of each token; padding tokens have row 0, and write to the null page
    "is_real": "T",
    "targets": "T",
    "query_starts": "B+1",
    "kv_lengths": "B",
    "adapters": "B",  # 0: none
    "slots": "B",  # padding rows, and those in no slot, point after the last one
    "is_sampling": "B",
    "length_limits": "B",
    "stop_token_ids": "B E",
    "sampling": "B C",
    "state_reads": "Y",  # of each row, see `layers.cache.StateSlots`; none without recurrent layers
    "state_writes": "Y",
    "image_rows": "Z",  # of each token; NO_IMAGE_ROW: text; in mixed programs of models with rows of embeddings
    "rope_positions": "3R",  # in time, rows and columns, if they are not the positions
    "draft_lengths": "N",  # drafted tokens to verify; these fields are those of speculative programs
    "is_position_unread": "N",  # the slot has the position
    "drafted_tokens": "N K1",  # read if no draft model or MTP layer drafts
    "num_pages": "N",  # of the row's first table
    "key_ends": "V",  # of each token, see `Paging.key_ends`; in mixed programs of models whose images attend both ways
    "block_tables": "B GM",
}
RESIDENT_FIELDS: Final = {name: shape for name, shape in INPUT_FIELDS.items() if name != "block_tables"} | {
    "table_rows": "B",  # row of each row's page table; padding rows point after the last slot
    "table_places": "T",  # entries that changed, as row * G * M + column, see `page_tables`
    "table_pages": "T",
}
"""Fields of a plan whose page tables stay on the device."""
SCORE_FIELDS: Final = {"logprobs": "T", "ranks": "T", "top_token_ids": "T W", "top_logprobs": "T W"}
"""A second output of mixed programs, read only when the plan has targets."""
OUTPUT_FIELDS: Final = {
    "num_steps": "",  # that were done
    "token_ids": "K B",
    "logprobs": "K B",
    "top_token_ids": "B W",
    "top_logprobs": "B W",
}


def field_shapes(program: Program, fields: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    letters = {
        "T": program.num_tokens,
        "B": program.num_rows,
        "B+1": program.num_rows + 1,
        "GM": program.num_tables * program.max_pages,
        "Y": program.num_rows if program.num_state_slots else 0,
        "Z": program.num_tokens if program.images is not None and program.kind == "mixed" else 0,
        "V": program.num_tokens if program.sees_whole_images else 0,
        "3R": 3 * program.num_tokens if program.images is not None and program.images.has_rope_positions else 0,
        "N": program.num_rows if program.kind == "speculate" else 0,
        "C": len(COLUMNS),
        "E": MAX_STOP_TOKENS,
        "K": program.max_steps,
        "K1": program.max_steps - 1,
        "W": MAX_TOP_LOGPROBS,
        "2": 2,
        "D": 0 if program.images is None else program.images.given_width,
        "S": 0 if program.images is None else program.images.num_sources,
        "TF": 0 if program.images is None else -(-program.num_tokens * program.images.patch_bytes // 4),
    }
    return {name: tuple(letters[letter] for letter in shape.split()) for name, shape in fields.items()}


@cache
def _places(program: Program, fields: tuple[tuple[str, str], ...]) -> tuple[tuple[str, slice, tuple[int, ...]], ...]:
    """Return name, place in the packed vector, and shape of the fields that have numbers. Every step asks for them."""
    shapes = {name: shape for name, shape in field_shapes(program, dict(fields)).items() if math.prod(shape)}
    ends = list(itertools.accumulate(map(math.prod, shapes.values()), initial=0))
    return tuple((name, slice(*ends[index : index + 2]), shape) for index, (name, shape) in enumerate(shapes.items()))


def packed_size(program: Program, fields: Mapping[str, str]) -> int:
    places = _places(program, tuple(fields.items()))
    return int(places[-1][1].stop) if places else 0


def split(packed: A, program: Program, fields: Mapping[str, str]) -> dict[str, A]:
    """Return views of the packed vector by field name; fields without numbers are left out."""
    return {name: packed[place].reshape(shape) for name, place, shape in _places(program, tuple(fields.items()))}


def pack(plan: StepPlan, program: Program, fields: Mapping[str, str] = INPUT_FIELDS) -> np.ndarray:
    """Return the packed input of `program`; what the plan does not fill is padding."""
    packed = np.zeros(packed_size(program, fields), np.int32)
    field = split(packed, program, fields)
    num_rows, num_tokens = len(plan.request_ids), plan.num_tokens
    counts, computed = plan.num_scheduled_tokens, plan.num_computed_tokens
    starts = np.concatenate(([0], np.cumsum(counts)))
    rows = np.repeat(np.arange(num_rows), counts)

    field["num_decode_rows"][...] = leading_ones(counts)
    field["num_top_logprobs"][...] = plan.num_top_logprobs
    field["num_steps"][...] = plan.num_steps
    field["num_prompt_logprobs"][...] = plan.num_prompt_logprobs
    field["tokens"][:num_tokens] = plan.token_ids
    field["positions"][:num_tokens] = np.arange(num_tokens) - starts[rows] + computed[rows]
    field["rows"][:num_tokens] = rows
    field["is_real"][:num_tokens] = 1
    _fill_targets(field["targets"], plan, starts)
    field["query_starts"][: num_rows + 1] = starts
    field["query_starts"][num_rows + 1 :] = num_tokens
    field["kv_lengths"][:num_rows] = computed + counts
    if plan.adapters is not None:
        field["adapters"][:num_rows] = plan.adapters
    field["slots"][:num_rows] = np.where(plan.slots == NO_SLOT, program.num_slots, plan.slots)
    field["slots"][num_rows:] = program.num_slots
    field["is_sampling"][:num_rows] = plan.is_sampling
    field["length_limits"][:num_rows] = plan.length_limits
    field["stop_token_ids"][:num_rows] = plan.stop_token_ids
    field["sampling"][:num_rows] = plan.sampling
    field["sampling"][num_rows:] = PADDING_ROW
    if "block_tables" in field:
        own, tables = (by_group(each, program.num_tables) for each in (plan.block_tables, field["block_tables"]))
        tables[:num_rows, :, : own.shape[2]] = own
    else:
        field["table_rows"][:num_rows] = table_rows(plan)
        field["table_rows"][num_rows:] = program.num_slots
        field["table_places"][:] = program.num_slots * program.num_tables * program.max_pages
    if "image_rows" in field:
        field["image_rows"][:] = NO_IMAGE_ROW
        if plan.image_rows is not None:
            field["image_rows"][:num_tokens] = plan.image_rows
    if "rope_positions" in field:
        places = field["rope_positions"].reshape(3, -1)
        places[:, :num_tokens] = field["positions"][:num_tokens] if plan.rope_positions is None else plan.rope_positions
    if plan.draft_lengths is not None:
        field["draft_lengths"][:num_rows] = plan.draft_lengths
        field["is_position_unread"][:num_rows] = plan.is_position_unread
        if plan.drafted_tokens is not None:
            field["drafted_tokens"][:num_rows] = plan.drafted_tokens
        first = by_group(plan.block_tables, program.num_tables)[:, 0]
        field["num_pages"][:num_rows] = np.count_nonzero(first != NULL_BLOCK, 1)
    if "key_ends" in field:
        ends = field["positions"][:num_tokens] + 1 if plan.key_ends is None else plan.key_ends
        field["key_ends"][:num_tokens] = ends
    if program.num_state_slots:
        field["state_writes"][:] = program.num_state_slots
        if plan.state_slots is not None:
            field["state_reads"][:num_rows], field["state_writes"][:num_rows] = plan.state_slots.T
    return packed


def _fill_targets(targets: np.ndarray, plan: StepPlan, starts: np.ndarray) -> None:
    """Fill in the tokens to score, and those that follow rows that sample nothing, which a multi-token-prediction layer reads."""
    if plan.targets is not None:
        targets[: plan.num_tokens] = plan.targets
    if plan.next_token_ids is not None:
        is_known = plan.next_token_ids != NO_TARGET
        targets[(starts[1:] - 1)[is_known]] = plan.next_token_ids[is_known]


def leading_ones(counts: np.ndarray) -> int:
    """Return the number of rows of one token at the start."""
    more = np.flatnonzero(counts != 1)
    return int(more[0]) if len(more) else len(counts)


class Outcome(NamedTuple):
    """The results of a program; rows of `token_ids` and `logprobs` are its steps."""

    num_steps: Int[Array, ""]
    token_ids: Int[Array, "K B"]
    logprobs: Float[Array, "K B"]
    top_token_ids: Int[Array, "B W"]
    top_logprobs: Float[Array, "B W"]


class Computed(NamedTuple):
    """Intermediate results of a step."""

    field: dict[str, Array]
    """Fields of the plan, without the tokens of rows that are over."""
    tokens: Int[Array, "T"]
    """The step's tokens, the unread ones filled in."""
    all_hidden: Callable[[], Float[Array, "T D"]]
    """Return the head's input of each token (`models.decoder.Forward.all_hidden`)."""
    sampled: Sampled
    images: ImageTokens | None
    """Embeddings that replace those of tokens; None if the program reads tokens only."""
    tapped: Float[Array, "T KD"] | None
    """See `models.decoder.Forward`."""


def no_outcome(program: Program) -> Outcome:
    """Return the results of a call before its first step. Traced."""
    steps, rows = (program.max_steps, program.num_rows), (program.num_rows, MAX_TOP_LOGPROBS)
    return Outcome(
        jnp.int32(0),
        jnp.zeros(steps, jnp.int32),
        jnp.zeros(steps, jnp.float32),
        jnp.zeros(rows, jnp.int32),
        jnp.zeros(rows, jnp.float32),
    )


def pack_arrays(arrays: NamedTuple, fields: Mapping[str, str]) -> jax.Array:
    """Return the arrays of these names as one vector, floats by their bits. Traced."""
    parts = []
    for name in fields:
        value = getattr(arrays, name)
        if value.dtype == jnp.float32:
            value = jax.lax.bitcast_convert_type(value, jnp.int32)
        parts.append(value.reshape(-1))
    return jnp.concatenate(parts)


def unpack(plan: StepPlan, program: Program, outputs: Sequence[np.ndarray], device_seconds: float) -> StepResult:
    """Return the rows of a packed result that `plan` fills, and the scores of its prompt tokens from a second output."""
    field, num_rows = split(outputs[0], program, OUTPUT_FIELDS), len(plan.request_ids)
    num_steps = int(field["num_steps"])
    return StepResult(
        token_ids=field["token_ids"][:num_steps, :num_rows],
        logprobs=field["logprobs"][:num_steps, :num_rows].view(np.float32),
        top_token_ids=field["top_token_ids"][:num_rows],
        top_logprobs=field["top_logprobs"][:num_rows].view(np.float32),
        device_seconds=device_seconds,
        prompt_scores=None if len(outputs) == 1 else _prompt_scores(outputs[1], program, plan.num_tokens),
        is_speculative=program.kind == "speculate",
    )


def _prompt_scores(packed: np.ndarray, program: Program, num_tokens: int) -> PromptScores:
    field = {name: values[:num_tokens] for name, values in split(packed, program, SCORE_FIELDS).items()}
    return PromptScores(
        logprobs=field["logprobs"].view(np.float32),
        ranks=field["ranks"],
        top_token_ids=field["top_token_ids"],
        top_logprobs=field["top_logprobs"].view(np.float32),
    )


DUMMY_ROWS: Final = 4
DUMMY_CHUNK: Final = 8
"""Tokens of the last row in a mixed dummy run. Enough to run the kernels of single rows and of chunks; one page holds them."""


def dummy_plan(program: Program) -> StepPlan:
    """A step of no request: a few rows of one token and, in mixed programs, a chunk. Its keys and values go to the null page,
    its samples are not kept."""
    num_rows = min(program.num_rows, DUMMY_ROWS)
    counts = np.ones(num_rows, np.int32)
    if program.kind == "mixed":
        counts[-1] = min(program.num_tokens - num_rows + 1, DUMMY_CHUNK)
    is_speculative = program.kind == "speculate"
    return StepPlan(
        kind=program.kind,
        bucket=program.num_tokens,
        request_ids=tuple(RequestId(f"dummy-{row}") for row in range(num_rows)),
        slots=np.arange(num_rows, dtype=np.int32),
        num_scheduled_tokens=counts,
        num_computed_tokens=np.zeros(num_rows, np.int32),
        token_ids=np.zeros(counts.sum(), np.int32),
        block_tables=np.zeros((num_rows, program.num_tables * program.max_pages), np.int32),
        is_sampling=np.zeros(num_rows, np.bool_),
        sampling=np.tile(device_row(EngineSamplingParams()), (num_rows, 1)),
        length_limits=np.full(num_rows, np.iinfo(np.int32).max, np.int32),
        stop_token_ids=np.full((num_rows, MAX_STOP_TOKENS), -1, np.int32),
        num_top_logprobs=0,
        draft_lengths=np.full(num_rows, program.max_steps - 1, np.int32) if is_speculative else None,
        is_position_unread=np.zeros(num_rows, np.bool_) if is_speculative else None,
    )


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A model, a multi-token-prediction layer of the model itself, an EAGLE-3 head, a DFlash drafter or a drafter of Gemma 4, that drafts
    `num_drafts` tokens for every row of a speculative step."""

    skeleton: DecoderSkeleton
    num_drafts: int


PlanT = TypeVar("PlanT", bound=Plan)
ResultT = TypeVar("ResultT")
Step = Callable[
    [Any, tuple[jax.Array, ...], StateArrays, jax.Array, Program], tuple[StateArrays, tuple[jax.Array, ...]]
]
"""A traced step: (skeleton, parameters, state, packed plan, program) to (state, outputs)."""


@dataclass(frozen=True, slots=True)
class StepTask(Generic[PlanT, ResultT]):
    """The functions that compute one kind of plan: `steps.GENERATION`, or what `embedding.embedding_task` returns."""

    name: str
    """Part of the key of each program: everything that decides what `step` computes."""
    step: Step
    fields: Mapping[str, str]
    """The packed plan's layout, see `inputs.split`."""
    programs: Callable[[Buckets, int, int, int], tuple[Program, ...]]
    """From (buckets, pages of the longest request, page tables of a request, state slots) to every program, largest first."""
    pack: Callable[[PlanT, Program], np.ndarray]
    unpack: Callable[[PlanT, Program, Sequence[np.ndarray], float], ResultT]
    """From (plan, program, outputs, device seconds)."""
    dummy_plan: Callable[[Program], PlanT]
    """A step of no request, for the first run of a program."""
    num_outputs: Callable[[PlanT], int] = lambda plan: 1
    """Outputs that the host reads, of those that a step returns."""
    update_state: Callable[[DeviceState, PlanT, Program, np.ndarray], None] = lambda state, plan, program, packed: None
    """Called before the step is dispatched; may fill in fields of its packed plan."""
    keeps_tables: bool = False
    """True if page tables are part of the state."""
    row_items: Callable[[PlanT], Sequence[EncodeItem | EmbedsItem]] = lambda plan: ()
    """Images to encode and embeddings to write before the step."""
    draft_model: DraftModel | None = None
    """Its parameters follow the model's, and its cache groups the model's."""
