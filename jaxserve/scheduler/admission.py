"""Decides on arrival whether a request can be served at all. Nothing here raises.

The API process checks most of this before it sends; the engine checks again, because an invalid request must
end as one failed request and never as a dead engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.errors import (
    ContextLengthError,
    InvalidRequestError,
    RateLimitError,
    RequestError,
    UnsupportedParameterError,
)
from jaxserve.ipc.image_info import ImageInfo
from jaxserve.ipc.messages import AddRequest, ErrorInfo
from jaxserve.ipc.prompt_embeds import PromptEmbedsInfo
from jaxserve.ipc.prompt_images import MAX_ROPE_POSITION, PromptImage
from jaxserve.sampling.params import token_ids_of


def error_info(error: RequestError) -> ErrorInfo:
    """Return the error as it crosses the process boundary."""
    return ErrorInfo(type(error).__name__, error.message, error.param, error.code)


def _num_patches(image: PromptImage, info: ImageInfo) -> int:
    """Return the patches that an encoder input must have; 0 for none."""
    if not info.num_sources:
        return image.num_tokens * info.merge**2 + info.has_class_token
    given, unit = len(image.positions) // 8, info.tile_patches or info.merge**2
    return given // unit * unit


@dataclass(frozen=True, slots=True)
class Admission:
    """The limits of an engine that generates."""

    max_model_len: int
    vocab_size: int
    num_usable_tokens: int
    """Tokens whose KV one request could hold if it were alone."""
    max_requests: int
    """Running and waiting requests together."""
    has_grammars: bool = False
    has_priorities: bool = True
    images: ImageInfo | None = None
    """None: the model reads text only."""
    prompt_embeds: PromptEmbedsInfo | None = None
    """None: prompts are tokens."""
    returns_routed_experts: bool = False

    def max_output_tokens(self, message: AddRequest) -> int:
        """Return `max_tokens`, cut to what the context leaves: one for a prompt that fills it, which is scored."""
        left = self.max_model_len - len(message.prompt_token_ids)
        return min(message.sampling.max_tokens, max(left, 1))

    def rejection(self, message: AddRequest, num_requests: int) -> RequestError | None:
        """Return why `message` is rejected while `num_requests` run or wait, or None."""
        return self._invalid(message) or queue_full(num_requests, self.max_requests)

    def _invalid(self, message: AddRequest) -> RequestError | None:
        tokens = message.prompt_token_ids
        num_tokens = len(tokens)
        if not tokens:
            return InvalidRequestError("prompt is empty: at least one token is needed", param="prompt")
        if message.sampling.max_tokens < 1:
            return InvalidRequestError(
                f"max_tokens {message.sampling.max_tokens} must be at least 1", param="max_tokens"
            )
        if min(tokens) < 0 or max(tokens) >= self.vocab_size:
            bad = next(token for token in tokens if not 0 <= token < self.vocab_size)
            return InvalidRequestError(
                f"prompt holds token id {bad}, this model's ids are 0 to {self.vocab_size - 1}", param="prompt"
            )
        for name, listed in token_ids_of(message.sampling).items():
            if listed and not 0 <= min(listed) <= max(listed) < self.vocab_size:
                return InvalidRequestError(
                    f"{name} holds token ids outside of this model's, 0 to {self.vocab_size - 1}", param=name
                )
        if message.grammar is not None and not self.has_grammars:
            return UnsupportedParameterError("This engine follows no grammars.")
        if message.returns_routed_experts and not self.returns_routed_experts:
            return UnsupportedParameterError("This engine returns no experts.", param="return_routed_experts")
        if message.images or message.rope_positions is not None:
            error = self._invalid_images(message)
            if error is not None:
                return error
        if message.prompt_embeds and (error := self._invalid_embeds(message)) is not None:
            return error
        if message.priority and not self.has_priorities:
            return no_priorities(message.priority)
        # A prompt that fills the context may have one token after it, which is not read: only its scores are wanted.
        if num_tokens + (message.sampling.max_tokens > 1) > self.max_model_len:
            return ContextLengthError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, your prompt contains "
                f"{num_tokens} input tokens, which leaves no room for output tokens. "
                "Please reduce the length of the input prompt."
            )
        whole = 0 if self.images is None else self.images.whole_prompt_tokens
        if whole and len(message.images) > 1:
            return InvalidRequestError(
                f"the prompt has {len(message.images)} images: this model, which sees prompts whole, reads one of them here",
                param="prompt",
            )
        if whole and message.sampling.num_prompt_logprobs is not None:
            return UnsupportedParameterError(
                "Tokens of a prompt have no log-probabilities: this model sees prompts whole.", param="prompt_logprobs"
            )
        if whole and num_tokens > whole:
            return ContextLengthError(
                f"prompt has {num_tokens} tokens. This model sees prompts whole, and one step computes up to {whole} of them "
                "(--max-num-batched-tokens, less a token for each other of --max-num-seqs requests, or the model's window). "
                "Please reduce the length of the prompt."
            )
        # The last token is never fed back, so it needs no KV.
        num_kv_tokens = num_tokens + self.max_output_tokens(message) - 1
        if num_kv_tokens > self.num_usable_tokens:
            return ContextLengthError(
                f"prompt ({num_tokens} tokens) and max_tokens ({self.max_output_tokens(message)}) need KV cache for "
                f"{num_kv_tokens} tokens, this server holds {self.num_usable_tokens}. Please shorten the prompt or "
                "lower max_tokens."
            )
        return None

    def _invalid_images(self, message: AddRequest) -> RequestError | None:
        """Return why images cannot be read, or None. What the API process sends is right, unless it has a fault."""
        info = self.images
        if info is None:
            return UnsupportedParameterError("This engine reads no images.", param="prompt")
        end = 0
        for image in message.images:
            num_patches = _num_patches(image, info)
            is_placed = end <= image.start and 0 < image.num_tokens <= info.max_tokens
            is_sized = 0 < num_patches <= info.max_patches and len(image.positions) == 8 * num_patches
            is_sized &= len(image.sources) == 4 * image.num_tokens * info.num_sources
            has_pixels = len(image.patches) in (
                num_patches * info.patch_bytes,
                num_patches * info.patch_bytes * info.num_frames,
            )
            has_lines = not image.line or (image.line > 0 and image.num_tokens % image.line == 0)
            if not (is_placed and is_sized and has_lines and has_pixels):
                return InvalidRequestError(f"the image at token {image.start} does not fit its place", param="prompt")
            end = image.start + image.length
        rope = message.rope_positions
        num_tokens = len(message.prompt_token_ids)
        is_turned = rope is None or (len(rope.prompt) == 12 * num_tokens and abs(rope.delta) <= MAX_ROPE_POSITION)
        if end > num_tokens or not is_turned:
            return InvalidRequestError("images and positions do not fit the prompt", param="prompt")
        return None

    def _invalid_embeds(self, message: AddRequest) -> RequestError | None:
        """Return why embeddings cannot be read, or None. What the API process sends is right, unless it has a fault."""
        info, end = self.prompt_embeds, 0
        if info is None:
            return UnsupportedParameterError("This engine takes no embeddings.", param="prompt_embeds")
        for part in message.prompt_embeds:
            is_sized = 0 < part.num_tokens <= info.piece_tokens and len(part.values) == 4 * part.num_tokens * info.width
            if part.start != end or not is_sized:
                return InvalidRequestError(
                    f"the embeddings at token {part.start} do not fit their place", param="prompt_embeds"
                )
            end += part.num_tokens
        if end != len(message.prompt_token_ids) or message.images or message.sampling.num_prompt_logprobs is not None:
            return InvalidRequestError("embeddings are not the whole prompt, or are scored", param="prompt_embeds")
        return None


@dataclass(frozen=True, slots=True)
class EmbedAdmission:
    """The limits of an engine that embeds."""

    max_model_len: int
    vocab_size: int
    max_requests: int
    """Running and waiting requests together."""
    has_priorities: bool = True

    def rejection(self, message: AddRequest, num_requests: int) -> RequestError | None:
        """Return why `message` is rejected while `num_requests` run or wait, or None."""
        tokens = message.prompt_token_ids
        if not tokens:
            return InvalidRequestError("input is empty: at least one token is needed", param="input")
        if min(tokens) < 0 or max(tokens) >= self.vocab_size:
            return InvalidRequestError(
                f"input holds token ids outside of this model's, 0 to {self.vocab_size - 1}", param="input"
            )
        if len(tokens) > self.max_model_len:
            return ContextLengthError(
                f"This model's maximum context length is {self.max_model_len} tokens, the input has {len(tokens)}.",
                param="input",
            )
        if message.priority and not self.has_priorities:
            return no_priorities(message.priority)
        return queue_full(num_requests, self.max_requests)


def no_priorities(priority: int) -> InvalidRequestError:
    """Return the error of a request with a priority where the scheduling policy has none."""
    return InvalidRequestError(
        f"priority {priority} must be 0: this server answers first come, first served (--scheduling-policy fcfs)",
        param="priority",
    )


def queue_full(num_requests: int, max_requests: int) -> RateLimitError | None:
    """Return the error of a request beyond the limit, or None."""
    if num_requests >= max_requests:
        return RateLimitError(f"the queue is full: {num_requests} requests run or wait. Please retry later.")
    return None
