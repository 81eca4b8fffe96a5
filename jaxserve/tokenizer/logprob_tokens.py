"""Character offsets of a completion's tokens."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.tokenizer.text_state import TextState
from jaxserve.tokenizer.tokenizer import Tokenizer


class TextOffsets:
    """`text_offset` of a completion: the character at which each token begins.

    Offsets ignore text held back for a stop string. A token inside a character has the offset of the character.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._state: TextState = tokenizer.text_state(skip_special_tokens=skip_special_tokens)
        self._state.skip_prompt(prompt_token_ids)
        self._offset = 0

    def push(self, token_ids: Sequence[int]) -> list[int]:
        """Return the offsets of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset += len(self._state.push(token_id))
        return offsets
