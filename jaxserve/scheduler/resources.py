"""Resources of running requests: KV pages, and slots of per-request device state."""

from __future__ import annotations

from collections.abc import Iterable

from jaxserve.kv.manager import KVManager
from jaxserve.scheduler.images.policy import ImagePolicy
from jaxserve.scheduler.request import Request


class Resources:
    """KV pages and slots of per-request device state, which running requests hold.

    A slot is free as soon as its request leaves it, since steps run in order and a new request initialises its slot
    before it reads it. Pages are free when no submitted step can write to them any more.
    """

    def __init__(self, kv: KVManager, num_slots: int, images: ImagePolicy | None = None) -> None:
        self._kv = kv
        self._images = images
        self._free_slots = list(range(num_slots - 1, -1, -1))

    def start(self, request: Request, num_running: int, now_s: float) -> bool:
        """Give `request` a slot and pages for all its known tokens; False if there are too few pages.

        A page for each running request stays free: otherwise the new request, the last in rank, would soon be preempted,
        and one that was just preempted would take its pages back from those that needed them.
        """
        num_cached = self._kv.start(
            request.table, request.tokens, num_spare_blocks=num_running, may_share=not request.num_unscored
        )
        if num_cached is None:
            return False
        request.start(self._free_slots.pop(), num_cached, now_s)
        return True

    def secure(self, running: list[Request], missing: list[int], *, may_preempt: bool) -> list[Request] | None:
        """Give every running request the pages for the tokens that it misses; preempt the last ones that hold pages of the same
        rank if need be.

        Returns those that were preempted, which are taken from `running` and `missing`. None if there would be one and may be
        none, because a step in flight still writes to its pages.
        """
        i, victims = 0, []
        while i < len(missing):
            request = running[i]
            num_computed = min(request.num_computed_tokens, request.length_limit - 1)  # less than after a whole draft
            if self._kv.extend(request.table, num_computed + missing[i], num_computed):
                i += 1
                continue
            if not may_preempt:
                return None
            rank = request.table.rank
            last = max(at for at in range(i, len(missing)) if running[at].table.rank == rank)
            del missing[last]
            victims.append(running.pop(last))
            self.preempt(victims[-1])
        return victims

    def preempt(self, request: Request) -> None:
        """Take pages and slot from a running request that is in no step in flight."""
        self._release_slot(request)
        self._kv.free(request.table)
        request.preempt()

    def forget_computed(self, requests: Iterable[Request]) -> None:
        """Forget what the weights have computed for requests that continue with others: images, and scores of prompts."""
        for request in requests:
            request.forget_scores()
        if self._images is not None:
            self._images.forget()

    def finish(self, request: Request) -> None:
        """Take the slot of a request that has ended, and its pages if no step in flight writes to them."""
        self._release_slot(request)
        self.release_pages(request)

    def _release_slot(self, request: Request) -> None:
        if request.slot is not None:
            self._free_slots.append(request.slot)
        if self._images is not None:
            self._images.release(request.images)

    def release_pages(self, request: Request) -> None:
        """Free the pages of a finished request, unless a step in flight writes to them."""
        if not request.num_in_flight:
            self._kv.free(request.table)
