"""The conversation before a response: the chain of responses that it continues."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from jaxserve.apis.responses.items import Item
from jaxserve.apis.responses.service import ResponseService
from jaxserve.errors import InvalidRequestError, invalid
from jaxserve.frontend.checks import shorten

_PARAM = "previous_response_id"


async def items_before(
    service: ResponseService, previous_response_id: str | None, reserve: Callable[[int], None]
) -> list[Item]:
    """Return input and output of every response of the chain, in order. Raises InvalidRequestError if one is missing.

    reserve: takes the bytes of each response before it is decoded, and raises RateLimitError without memory.
    """
    turns: list[list[Item]] = []
    response_id = previous_response_id
    while response_id is not None:
        await asyncio.sleep(0)  # other requests run between two responses of a long chain
        stored = await service.get(response_id, reserve)
        if stored is None:
            raise InvalidRequestError(
                f"Previous response with id {shorten(response_id)} not found.",
                param=_PARAM,
                code="previous_response_not_found",
            )
        if stored.status == "in_progress":
            raise invalid(_PARAM, f"the response {shorten(response_id)} is still in progress")
        turns.append(stored.items())
        response_id = stored.previous_response_id
    return [item for turn in reversed(turns) for item in turn]
