"""Branches and waits of a warp.

Modelled, from the PTX ISA ("Control Flow Instructions", "Parallel Synchronization and Communication Instructions"):
branches that all threads of a warp take together, named barriers, mbarriers, the fence between proxies. Instructions in
`_WITHOUT_EFFECT` change nothing that is modelled.
"""

from __future__ import annotations

from tests.ptx.barriers import ThreadBarrier, TransactionBarrier
from tests.ptx.machine import WARP, Step, Warp
from tests.ptx.operands import Decoder, active, address, reader, same, writer
from tests.ptx.parser import Instruction, Source

_WITHOUT_EFFECT = (
    "prefetch.tensormap",
    "fence.mbarrier_init.release.cluster",  # of barriers that other blocks use; there are none
    "setmaxnreg.dec.sync.aligned.u32",
    "setmaxnreg.inc.sync.aligned.u32",
)


def _branch(instruction: Instruction, source: Source) -> Step:
    (label,) = instruction.operands
    is_taken, place = active(instruction, source), source.labels[label]

    def step(warp: Warp) -> None:
        taken, here = is_taken(warp), warp.here
        if taken[here].all():
            warp.jump(place)
        elif taken.any():
            warp.part(here & ~taken, place)

    return step


def _return(instruction: Instruction, source: Source) -> Step:
    end = len(source.instructions)
    return lambda warp: warp.jump(end)


def _meet(instruction: Instruction, source: Source) -> Step:
    name, *threads = instruction.operands
    read_number = reader(source, name, "u32")
    num_threads = int(threads[0]) if threads else None

    def step(warp: Warp) -> None:
        number = same(read_number(warp))
        barrier = warp.block.thread_barriers.setdefault(number, ThreadBarrier(warp.block.shared.order))
        turn = barrier.arrive(warp.index, (num_threads or warp.block.launch.num_threads) // WARP)
        warp.pause(lambda: barrier.has_passed(turn))

    return step


def _make_barrier(instruction: Instruction, source: Source) -> Step:
    target, count = instruction.operands
    is_active, address_of, read_count = (
        active(instruction, source),
        address(source, target),
        reader(source, count, "u32"),
    )

    def step(warp: Warp) -> None:
        if is_active(warp).any():
            where = same(address_of(warp))
            warp.block.shared.give_to_barrier(where)
            warp.block.barriers[where] = TransactionBarrier(same(read_count(warp)))

    return step


def _arrive(instruction: Instruction, source: Source) -> Step:
    _, target, *count = instruction.operands
    is_active, address_of = active(instruction, source), address(source, target)
    read_count = reader(source, count[0] if count else "1", "u32")

    def step(warp: Warp) -> None:
        arrivals = int(read_count(warp)[is_active(warp)].sum())
        warp.block.barrier(same(address_of(warp))).arrive(arrivals)

    return step


def _arrive_in_phase(instruction: Instruction, source: Source) -> Step:
    """Each thread arrives `count` times, and is not the last to come in the phase."""
    _, target, count = instruction.operands
    is_active, address_of, read_count = (
        active(instruction, source),
        address(source, target),
        reader(source, count, "u32"),
    )

    def step(warp: Warp) -> None:
        arrivals = int(read_count(warp)[is_active(warp)].sum())
        warp.block.barrier(same(address_of(warp))).arrive(arrivals, is_last=False)

    return step


def _arrive_and_expect(instruction: Instruction, source: Source) -> Step:
    """Each thread arrives once, and expects bytes of its own."""
    _, target, num_bytes = instruction.operands
    is_active, address_of, read_bytes = (
        active(instruction, source),
        address(source, target),
        reader(source, num_bytes, "u32"),
    )

    def step(warp: Warp) -> None:
        here = is_active(warp)
        barrier = warp.block.barrier(same(address_of(warp)))
        barrier.arrive(int(here.sum()), int(read_bytes(warp)[here].sum()))

    return step


def _try_wait(instruction: Instruction, source: Source) -> Step:
    """Waits as long as it takes, so its loop ends in the first round."""
    target, barrier_operand, parity, _ = instruction.operands
    write, done = writer(source, target), reader(source, "1", "pred")
    address_of, read_parity = address(source, barrier_operand), reader(source, parity, "u32")

    def step(warp: Warp) -> None:
        barrier, phase = warp.block.barrier(same(address_of(warp))), same(read_parity(warp))
        write(warp, done(warp))
        warp.pause(lambda: barrier.has_completed(phase))

    return step


def _fence_proxies(instruction: Instruction, source: Source) -> Step:
    return lambda warp: warp.block.shared.fence(warp.index)


def _nothing(instruction: Instruction, source: Source) -> Step:
    return lambda warp: None


TABLE: dict[str, Decoder] = {
    "bra": _branch,
    "bra.uni": _branch,
    "ret": _return,
    "bar.sync": _meet,
    "mbarrier.init.shared::cta.b64": _make_barrier,
    "mbarrier.init.shared.b64": _make_barrier,
    "mbarrier.arrive.noComplete.shared.b64": _arrive_in_phase,
    "mbarrier.arrive.release.cta.shared::cta.b64": _arrive,
    "mbarrier.arrive.expect_tx.shared.b64": _arrive_and_expect,
    "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64": _arrive_and_expect,
    "mbarrier.try_wait.parity.shared.b64": _try_wait,
    "fence.proxy.async.shared::cta": _fence_proxies,
    **dict.fromkeys(_WITHOUT_EFFECT, _nothing),
}
GUARDED = frozenset(name for name in TABLE if name.startswith(("bra", "mbarrier.init", "mbarrier.arrive", "prefetch")))
"""Instructions that obey their guard."""
