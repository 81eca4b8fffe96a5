"""`GET /routing`: what a router before several servers wants to know of one."""

from __future__ import annotations

from base64 import b64encode
from functools import partial

from jaxserve.apis.routes import Call, Route
from jaxserve.apis.schema.common import ModelQuery
from jaxserve.http.operations.schema import RoutingState

PAGE_KEY_BYTES = 8
"""Leading bytes of a page's hash that are reported. A collision makes a route worse, never a reply wrong."""


@partial(Route, "GET", "/routing", tag="Operation", reply=RoutingState, errors=(503,))
async def routing(call: Call, query: ModelQuery) -> RoutingState:
    """Report the load, and the cached pages if --publish-pages is set."""
    call.frontend.require_model(query.model)
    client = call.frontend.client
    model_info = client.require_ready()
    pages = {page[:PAGE_KEY_BYTES] for held in client.engines.pages.values() for page in held.published}
    return RoutingState(
        queued_tokens=client.engines.num_waiting_tokens,
        num_sequences=client.admission.num_sequences,
        max_num_seqs=sum(model.max_num_seqs for model in client.engines.models()),
        block_size=model_info.block_size,
        pages=b64encode(b"".join(sorted(pages))).decode(),
    )
