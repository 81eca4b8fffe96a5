"""The request for generated text that every API translates into, and the checks that need neither model nor tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from jaxserve.bounds import Bound
from jaxserve.config import LimitsConfig
from jaxserve.errors import InvalidRequestError, invalid, unsupported
from jaxserve.frontend.checks import check_bound, check_json_chars
from jaxserve.frontend.constraints import Constraint
from jaxserve.frontend.images.source import ImageSource
from jaxserve.frontend.messages import ChatMessage, FunctionDefinition, ToolChoice, check_functions, check_messages
from jaxserve.frontend.prompt_embeds.prompt import EmbedsSource, refuse_scores
from jaxserve.frontend.sampling import SamplerFields
from jaxserve.types import LogprobsMode

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

MESSAGES: Final = Bound("items", 1, "max_messages")
THINKING_BUDGET: Final = Bound("value", 1, 2**31 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldNames:
    """Paths of a request's fields in the API that its caller speaks: errors name what was sent. Default: chat's."""

    prompt: str = "messages"
    function: str = "tools[{}].function"
    """The definition of a function, with the place of its index."""
    parameters: str = "parameters"
    reasoning_effort: str = "reasoning_effort"
    thinking: str = "thinking"
    thinking_budget: str = "thinking_token_budget"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A prompt made of messages by the model's chat template."""

    messages: Sequence[ChatMessage]
    functions: Sequence[FunctionDefinition] = ()
    """Tools that the model may call."""
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    is_parallel: bool | None = None
    """True: a reply may have several calls. False: it ends with its first call. None: it may have several, but a forced call
    in a format that had to be explained is the only one, since models that were not trained for it repeat calls without end."""
    reasoning_effort: ReasoningEffort | None = None
    thinking: bool | None = None
    """True and False switch the model's reasoning on and off. None: the template decides."""
    thinking_budget: int | None = None
    """Number of tokens after which reasoning ends."""
    documents: Sequence[Mapping[str, Any]] | None = None
    """Documents that the template reads."""
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template; they override the others."""
    add_generation_prompt: bool | None = None
    """False: the prompt does not open an assistant's message."""
    continue_final_message: bool = False
    """True: the reply continues the last message, which is the assistant's."""
    names: FieldNames = field(default_factory=FieldNames)
    images: Sequence[ImageSource] = ()
    """The images of the messages' image parts, in their order."""

    @property
    def offered(self) -> list[tuple[int, FunctionDefinition]]:
        """Functions that the template shows, with their indices."""
        allowed = self.tool_choice.allowed
        if self.tool_choice.mode == "none":
            return []
        return [
            (i, function) for i, function in enumerate(self.functions) if allowed is None or function.name in allowed
        ]

    def check(self, limits: LimitsConfig) -> None:
        """Raise InvalidRequestError for what no model could be given."""
        check_bound(MESSAGES, self.names.prompt, self.messages, limits)
        if self.thinking_budget is not None:
            check_bound(THINKING_BUDGET, self.names.thinking_budget, self.thinking_budget, limits)
        most = Bound("characters", 0, "max_template_kwargs_chars")
        check_json_chars(most, "chat_template_kwargs", self.template_variables, limits)
        check_messages(self.messages, is_last_continued=self.continue_final_message)
        self.tool_choice.check(check_functions(self.functions, self.names.function, limits))
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequestError(
                "Cannot set both `continue_final_message` and `add_generation_prompt` to true.",
                param="continue_final_message",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """Prompts given as texts, token ids or embeddings."""

    prompts: Sequence[str | list[int] | EmbedsSource]
    add_special_tokens: bool = True
    """False: texts do not get the tokenizer's begin token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request for generated text, as chat, completions, Responses, Anthropic's Messages and `LLM` translate it."""

    prompt: Conversation | Texts
    sampling: SamplerFields
    """Sampling options that the caller gave; the model's recommendations replace absent ones."""
    model: str | None = None
    """Name of the model or of an adapter. None: the model."""
    n: int = 1
    """Number of replies to each prompt."""
    max_tokens: int | None = None
    """Number of tokens that may be generated. None: as many as fit the context."""
    is_limit_clipped: bool = False
    """True: a reply ends where the context ends. False: a limit beyond the context is an error."""
    num_top_logprobs: int | None = None
    """None: no log-probabilities; 0: those of the chosen tokens; n: and of the n most likely ones."""
    num_prompt_logprobs: int | None = None
    """The number of most likely tokens to report for each token of the prompt. None: no log-probabilities of it."""
    logprobs_mode: LogprobsMode | None = None
    """The mode that log-probabilities must have. None: the engine's."""
    stop: Sequence[str] = ()
    include_stop: bool = False
    """True: the reply has the text or token that ended it."""
    skip_special_tokens: bool = True
    returns_token_ids: bool = False
    """True: replies have the ids of their tokens."""
    returns_routed_experts: bool = False
    """True: replies have the experts that their tokens chose."""
    constraint: Constraint | None = None
    """The format that replies must have."""
    prediction: str = ""
    """Text that the reply is expected to resemble: drafts are taken from it."""
    priority: int | None = None
    """Requests with a lower number are served first. None: what is usual for the API key."""
    cache_salt: str | None = None

    @property
    def prompt_name(self) -> str:
        """The field of the prompt, for error texts."""
        return self.prompt.names.prompt if isinstance(self.prompt, Conversation) else "prompt"

    @property
    def is_constrained(self) -> bool:
        """True if replies may have to follow a grammar: of a format, of calls, or of reasoning with a limit."""
        prompt = self.prompt
        has_calls = isinstance(prompt, Conversation) and bool(prompt.functions)
        is_limited = isinstance(prompt, Conversation) and prompt.thinking_budget is not None
        return self.constraint is not None or has_calls or is_limited

    @property
    def num_sequences(self) -> int:
        return self.n * (len(self.prompt.prompts) if isinstance(self.prompt, Texts) else 1)

    @property
    def num_listed_logprobs(self) -> int | None:
        """The number of tokens whose log-probabilities are reported for each one of the reply; None: no log-probabilities."""
        if self.num_top_logprobs is None:
            return None
        return len(self.sampling.logprob_token_ids or ()) or self.num_top_logprobs

    def check(self, limits: LimitsConfig) -> None:
        """Raise InvalidRequestError for what no model could be given."""
        if self.sampling.logprob_token_ids is not None and self.num_top_logprobs is None:
            raise InvalidRequestError(
                "When using `logprob_token_ids`, `logprobs` must be asked for.", param="logprob_token_ids"
            )
        if isinstance(self.prompt, Texts) and self.num_prompt_logprobs is not None:
            refuse_scores("prompt_logprobs", self.prompt.prompts)
        if isinstance(self.prompt, Conversation):
            self.prompt.check(limits)
            if self.constraint is not None and self.prompt.offered and not self.constraint.is_json:
                raise unsupported(
                    self.constraint.param, "is not supported together with tools: only JSON, with or without a schema"
                )
        elif self.num_sequences > limits.max_total_choices:
            raise invalid(
                "n",
                f"prompts times n may be at most {limits.max_total_choices} (--max-total-choices), "
                f"got {len(self.prompt.prompts)} x {self.n}",
            )
