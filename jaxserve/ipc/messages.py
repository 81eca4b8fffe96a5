"""Every type that crosses the process boundary. Plain data, MessagePack, never pickle.

API -> engine: `Hello`, `AddRequest`, `Abort`, `Command`.
Engine -> API: `StartupProgress`, `Ready`, `StartupFailed`, `StepOutputs`, `Heartbeat`, `CommandDone`.

Every `AddRequest` is answered by exactly one `RequestOutput` with a `finish_reason` (its terminal
message): finished ("stop", "length"), aborted ("abort"), or failed/rejected ("error" with `error` set).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from jaxserve.ipc.report import StartupReport
from jaxserve.ipc.stats import EngineStats
from jaxserve.sampling.params import EngineSamplingParams
from jaxserve.types import FinishReason, Pooling, RequestId


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of everything on the wire."""


class Hello(Message, frozen=True):
    """First message of an API process: the engine answers with progress, then `Ready`."""


Terminals = tuple[str | int, ...]
"""Text, and control tokens by their ids."""


class CallTemplate(msgspec.Struct, frozen=True, array_like=True):
    """The format of a call of one function: its arguments as JSON between two texts."""

    begin: Terminals
    schema: dict[str, Any]
    end: Terminals


class CallGrammar(msgspec.Struct, frozen=True, array_like=True):
    """A reply that consists of at least one call, or of text with calls in it."""

    begin: Terminals
    """Precedes the calls."""
    templates: list[CallTemplate]
    separator: Terminals | None
    """Stands between two calls; None: there is exactly one call."""
    end: Terminals
    """Follows the calls."""
    allows_text: bool = False
    """True if the reply may be any text, with calls after each `begin`. If `begin` is empty, the reply is either text or
    calls."""
    reasoning: str = ""
    """The start of the model's reasoning. Text must not begin with it, since `Thinking` covers it."""


class ThinkingBudget(msgspec.Struct, frozen=True, array_like=True):
    """Where reasoning ends at the latest."""

    max_tokens: int
    closer: int
    """The token that spells the end."""


class Thinking(msgspec.Struct, frozen=True, array_like=True):
    """Reasoning in front of a reply."""

    opener: Terminals
    closer: Terminals
    is_open: bool
    """Whether it has begun in the prompt; else the reply may begin with it."""
    budget: ThinkingBudget | None = None
    """None: it ends when the model ends it."""


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """What a reply is held to. The engine takes it as it is: who sends it has had it checked."""

    kind: Literal["json_schema", "regex", "lark", "calls"]
    text: str
    """A JSON schema as JSON, a regular expression (Rust's syntax, of the whole reply), a grammar in Lark's form, or
    CallGrammar as JSON."""
    thinking: Thinking | None = None
    """What the model may write before the grammar begins; None: nothing."""


class AddRequest(Message, frozen=True):
    request_id: RequestId
    prompt_token_ids: list[int]
    sampling: EngineSamplingParams
    priority: int = 0
    cache_salt: str | None = None
    grammar: Grammar | None = None
    text_pair_start: int | None = None
    """Of a pair of texts for a cross-encoder that tells them apart: the place of the second one's first token."""
    adapter: int = 0
    """Its place in `--lora-modules`, from 1; 0: the model as it is."""
    prediction_token_ids: list[int] = []
    """What the reply may be, where somebody has an idea: drafts are taken from it."""


class Abort(Message, frozen=True):
    """Stop these requests. `finish_reason` of their terminal message is "abort"."""

    request_ids: list[RequestId]


CommandName = Literal["reset_prefix_cache", "start_profile", "stop_profile"]


class Command(Message, frozen=True):
    """What whoever runs the server asks of the engine; answered by one `CommandDone`."""

    command_id: int
    """The client's own."""
    name: CommandName


class StartupProgress(Message, frozen=True):
    """`done` of `total` units in a start-up phase ("load", "compile", ...)."""

    phase: str
    done: int
    total: int
    detail: str = ""


class EmbeddingInfo(msgspec.Struct, frozen=True, array_like=True):
    """Of a model that makes vectors."""

    size: int
    """Numbers of a vector."""
    pooling: Pooling
    normalizes: bool
    """Whether its vectors are meant to have length 1. The engine leaves them as they come."""
    scores_pairs: bool = False
    """Whether it is a cross-encoder: each text is a pair, and its vector is the pair's score."""


class ModelInfo(msgspec.Struct, frozen=True, array_like=True):
    """What the API process has to know of the loaded model."""

    vocab_size: int
    max_model_len: int
    num_kv_blocks: int
    block_size: int
    max_num_seqs: int
    """Requests that run at the same time."""
    kv_dtype: str
    platform: str
    num_devices: int
    fingerprint: str
    """8 hex digits over weights' identity, dtype, mesh and versions: part of `system_fingerprint`."""
    startup: StartupReport = StartupReport()
    embedding: EmbeddingInfo | None = None
    """Of an engine that embeds; None: it generates."""
    sampling_defaults: dict[str, int | float] = {}
    """Fields of EngineSamplingParams that requests leave out, where the model has a better value."""


class Ready(Message, frozen=True):
    model_info: ModelInfo


class StartupFailed(Message, frozen=True):
    """One readable line; the engine process exits with code 2 afterwards."""

    message: str


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probability of the chosen token, and of the most likely ones, most likely first."""

    logprob: float
    top_token_ids: list[int]
    top_logprobs: list[float]
    rank: int | None = None
    """1 + the number of tokens that are more likely; of prompt tokens only."""


class ErrorInfo(msgspec.Struct, frozen=True, array_like=True):
    """An error of `errors.REQUEST_ERRORS`, by class name."""

    error_class: str
    message: str
    param: str | None = None
    code: str | None = None


class RequestOutput(msgspec.Struct, frozen=True, array_like=True):
    """News of one request from one step."""

    request_id: RequestId
    token_ids: list[int]
    """New tokens, oldest first. The token that ended the request (EOS, stop id) is included."""
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop_token_ids entry that ended the request; None for EOS and everything else."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache. Set on every output."""
    error: ErrorInfo | None = None
    queue_seconds: float | None = None
    """Time from arrival in the engine to the first step that computed the request; None until then."""
    num_preemptions: int = 0
    """How often the request was put back to waiting so far. Set on every output."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """The next ones, from the second prompt token on. All have come with the first token, most of them before it."""
    vector: bytes | None = None
    """Of an engine that embeds: the text's, float32, little-endian, as long as it comes."""
    num_accepted_tokens: int = 0
    """Tokens of drafts that were right so far. Set on every output, as the next."""
    num_rejected_tokens: int = 0


class StepOutputs(Message, frozen=True):
    """All news of one engine step: one message per step, not one per token."""

    outputs: list[RequestOutput]
    stats: EngineStats | None = None


class Heartbeat(Message, frozen=True):
    """Sent when nothing else was for a while: the loop is alive."""

    stats: EngineStats | None = None
    """Only for the one client that gets the statistics."""


class CommandDone(Message, frozen=True):
    """The end of a `Command`."""

    command_id: int
    error: ErrorInfo | None = None
    """Why nothing was done."""


ToEngine = Hello | AddRequest | Abort | Command
FromEngine = StartupProgress | Ready | StartupFailed | StepOutputs | Heartbeat | CommandDone
