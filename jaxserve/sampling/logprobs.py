"""Options that choose the tokens whose log-probabilities are returned: `(token ids, value, *state) -> token ids`."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxserve.sampling.transform import StateField, padded, stateful
from jaxserve.types import MAX_TOP_LOGPROBS

_LISTED = StateField(
    "logprob_ids",
    (MAX_TOP_LOGPROBS,),
    lambda init, _: padded(init.sampling.logprob_token_ids or (), (MAX_TOP_LOGPROBS,), 0),
)


@stateful(_LISTED)
def logprob_token_ids(
    most_likely: Int[Array, "B L"], num_listed: Int[Array, "B"], listed: Int[Array, "B L"]
) -> Int[Array, "B L"]:
    """Return the listed tokens in rows that have a list, else the most likely ones."""
    return jnp.where(num_listed[:, None] > 0, listed, most_likely)
