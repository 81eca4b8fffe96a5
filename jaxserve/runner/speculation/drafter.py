"""The part of a speculative step that drafts: a draft model, the multi-token-prediction layer of the model itself, an EAGLE-3 head, a
DFlash drafter, or a drafter of Gemma 4."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from jaxtyping import Array, Int

from jaxserve.layers.cache import Cache
from jaxserve.models.skeleton import AssistantSkeleton, DFlashSkeleton, EagleSkeleton, ModelSkeleton, PredictorSkeleton
from jaxserve.runner.inputs import Computed, DraftModel, Program
from jaxserve.runner.speculation.assistant import AssistantDrafter
from jaxserve.runner.speculation.dflash import BlockDrafter
from jaxserve.runner.speculation.draft_model import ModelDrafter
from jaxserve.runner.speculation.predictor import PredictorDrafter
from jaxserve.runner.speculation.rows import Verified


@runtime_checkable  # arguments are checked in tests
class Drafter(Protocol):
    """Drafts within one traced step. It has cache groups of its own, which follow the model's, or none, and then gets the model's."""

    def fill(self, computed: Computed, cache: Cache) -> Cache:
        """Return the cache (DONATED) with what the drafter stores of the tokens of a mixed step."""
        ...

    def draft(self, verified: Verified, cache: Cache) -> tuple[Int[Array, "B N"], Cache]:
        """Return N drafted tokens after each row's newest one, and the cache (DONATED)."""
        ...


def make_drafter(
    draft: DraftModel, skeleton: ModelSkeleton, params: tuple[Array, ...], program: Program
) -> tuple[Drafter, tuple[Array, ...]]:
    """Return the drafter of `draft` for the model `skeleton`, and the model's parameters.

    params: those of the model, then of the drafter.
    """
    num_arrays = len(skeleton.arrays)
    params, own = params[:num_arrays], params[num_arrays:]
    if isinstance(draft.skeleton, PredictorSkeleton | EagleSkeleton):
        return PredictorDrafter(draft.skeleton, draft.num_drafts, own, skeleton.build(params), program), params
    if isinstance(draft.skeleton, DFlashSkeleton):
        return BlockDrafter(draft.skeleton, draft.num_drafts, own, skeleton.build(params), program), params
    if isinstance(draft.skeleton, AssistantSkeleton):
        return AssistantDrafter(draft.skeleton, draft.num_drafts, own, skeleton.build(params), program), params
    return ModelDrafter(draft.skeleton, draft.num_drafts, own, program), params
