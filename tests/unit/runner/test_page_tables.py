"""Page tables on the device hold what each step needs, though only changes are sent."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu.plans import Rows
from benchmarks.gpu.random_weights import host_leaves
from benchmarks.gpu.rig import Rig, generate, greedy
from benchmarks.gpu.shapes import TINY, decoder
from jaxserve.layers.policy import plain
from jaxserve.runner.inputs import RESIDENT_FIELDS as FIELDS
from jaxserve.runner.inputs import Program, pack, programs, split
from jaxserve.runner.page_tables import SentTables, table_rows
from jaxserve.runner.steps import GENERATION, RESIDENT_GENERATION
from jaxserve.scheduler.plan import NO_SLOT, Buckets, StepPlan
from jaxserve.types import RequestId
from tests.engine.quick_sampler import quick_programs

PAGE_SIZE, NUM_SLOTS, MAX_PAGES = 16, 4, 32
PROGRAM = Program("decode", NUM_SLOTS, NUM_SLOTS, MAX_PAGES, NUM_SLOTS)


def plan_of(slots: list[int], num_computed: list[int], tables: np.ndarray, num_steps: int = 1) -> StepPlan:
    rows = Rows(PROGRAM, tables, tuple(RequestId(str(row)) for row in range(len(slots))))
    whole = rows.step(0, num_steps=num_steps)
    fields = {name: getattr(whole, name) for name in StepPlan.__slots__}
    return StepPlan(**fields | {"slots": np.array(slots, np.int32), "num_computed_tokens": np.array(num_computed)})


def test_every_step_finds_the_pages_of_its_rows() -> None:
    """Requests come and go, some with long prefixes, at random."""
    random = np.random.default_rng(3)
    sent, tables = SentTables(NUM_SLOTS, MAX_PAGES, PAGE_SIZE), np.zeros((NUM_SLOTS + 1, MAX_PAGES), np.int32)
    lengths, pages = np.zeros(NUM_SLOTS, int), np.zeros((NUM_SLOTS, MAX_PAGES), np.int32)
    singles: list[int] = []
    for _ in range(300):
        for slot in range(NUM_SLOTS):
            if random.random() < 0.05 or lengths[slot] >= MAX_PAGES * PAGE_SIZE - 2:
                lengths[slot] = random.integers(0, MAX_PAGES * PAGE_SIZE // 2)
                pages[slot] = random.integers(1, 1000, MAX_PAGES)
        slots = random.permutation(NUM_SLOTS)[: random.integers(1, NUM_SLOTS + 1)].tolist()
        plan = plan_of(slots, lengths[slots].tolist(), pages[slots])
        changes = sent.update(plan, most=PROGRAM.num_tokens)
        singles.append(len(changes.places))
        for slot, row in changes.whole_rows:
            tables[slot] = row
        tables.reshape(-1)[changes.places] = changes.pages
        for slot in slots:
            needed = lengths[slot] // PAGE_SIZE + 1
            np.testing.assert_array_equal(tables[slot, :needed], pages[slot, :needed])
        lengths[slots] += 1
    assert max(singles) <= PROGRAM.num_tokens
    assert sum(singles) < 150, "a step of a request changes a page in sixteen"


def test_each_table_of_a_request_gets_its_own_pages() -> None:
    """The second table is that of a window: entries before it are null, and are not sent."""
    sent = SentTables(NUM_SLOTS, MAX_PAGES, PAGE_SIZE, num_tables=2)
    own = np.zeros((1, 2, 8), np.int32)
    own[0, 0, :4], own[0, 1, 2:4] = [5, 6, 7, 8], [3, 4]
    plan = plan_of([1], [4 * PAGE_SIZE - 1], own.reshape(1, -1))
    changes = sent.update(plan, most=8)
    row = 2 * MAX_PAGES
    places = [row, row + 1, row + 2, row + 3, row + MAX_PAGES + 2, row + MAX_PAGES + 3]
    assert dict(zip(changes.places.tolist(), changes.pages.tolist(), strict=True)) == dict(
        zip(places, [5, 6, 7, 8, 3, 4], strict=True)
    )
    (whole,) = SentTables(NUM_SLOTS, MAX_PAGES, PAGE_SIZE, num_tables=2).update(plan, most=2).whole_rows
    assert whole[0] == 1
    assert np.flatnonzero(whole[1]).tolist() == [0, 1, 2, 3, MAX_PAGES + 2, MAX_PAGES + 3]


def test_drafted_tokens_have_the_table_of_their_request() -> None:
    tables = np.arange(3 * MAX_PAGES, dtype=np.int32).reshape(3, -1)
    plan = plan_of([2, NO_SLOT, 0], [15, 16, 3], tables[[1, 1, 2]])
    assert table_rows(plan).tolist() == [2, 2, 0]
    changes = SentTables(NUM_SLOTS, MAX_PAGES, PAGE_SIZE).update(plan, most=4)
    entries = dict(zip(changes.places.tolist(), changes.pages.tolist(), strict=True))
    assert entries == {2 * MAX_PAGES: 32, 2 * MAX_PAGES + 1: 33, 0: 64}


def test_padding_changes_no_request_and_reads_no_table() -> None:
    plan = plan_of([1], [0], np.zeros((1, MAX_PAGES), np.int32))
    field = split(pack(plan, PROGRAM, FIELDS), PROGRAM, FIELDS)
    assert field["table_rows"].tolist() == [1, NUM_SLOTS, NUM_SLOTS, NUM_SLOTS]
    assert (field["table_places"] == NUM_SLOTS * MAX_PAGES).all()
    assert "block_tables" not in field


@pytest.mark.slow
def test_requests_get_the_same_tokens_with_tables_on_the_device() -> None:
    """More requests than slots, so that slots are used again; prompts of several pages and of several chunks."""
    shape = decoder(TINY | {"num_hidden_layers": 1})
    random = np.random.default_rng(0)
    requests = [
        greedy(f"request-{index}", random.integers(0, shape.vocab_size, length), 20)
        for index, length in enumerate((3, 70, 16, 33, 120, 5, 48))
    ]
    found = []
    for task in (GENERATION, RESIDENT_GENERATION):
        rig = Rig(shape, plain(jnp.dtype("float32")), num_blocks=65, max_model_len=256)
        rig.task = task
        with quick_programs():
            made, _ = rig.compile(programs(Buckets(decode=(4,), mixed=(64,), max_num_seqs=4), rig.max_pages), 600.0)
        runner = rig.runner(rig.place(host_leaves(rig.skeleton, 1)), made)
        found.append(generate(rig.core(runner, made), requests).token_ids)
    assert found[0] == found[1]
