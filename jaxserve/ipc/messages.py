"""The messages between API processes and the engine. Plain data, MessagePack, never pickle.

API -> engine: `Hello`, `AddRequest`, `Abort`, `Command`.
Engine -> API: `StartupProgress`, `Ready`, `StartupFailed`, `StepOutputs`, `Heartbeat`, `CommandDone`, `PagesChanged`,
`AdaptersChanged`.

Every `AddRequest` is answered by exactly one `RequestOutput` with a `finish_reason` (its terminal
message): finished ("stop", "length"), aborted ("abort"), or failed/rejected ("error" with `error` set).
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from jaxserve.ipc.call_grammar import Terminals
from jaxserve.ipc.image_info import ImageInfo
from jaxserve.ipc.prompt_embeds import PromptEmbeds, PromptEmbedsInfo
from jaxserve.ipc.prompt_images import PromptImage, RopePositions
from jaxserve.ipc.report import ModelWork, StartupReport
from jaxserve.ipc.routed_experts import RoutedExpertsInfo
from jaxserve.ipc.stats import EngineStats
from jaxserve.sampling.params import EngineSamplingParams
from jaxserve.types import FinishReason, LabelActivation, LogprobsMode, Pooling, RequestId


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of all messages."""


class Hello(Message, frozen=True):
    """First message of an API process: the engine answers with progress, then `Ready`."""


class ThinkingBudget(msgspec.Struct, frozen=True, array_like=True):
    """The limit of reasoning."""

    max_tokens: int
    closer: int
    """The token that ends reasoning."""


class Thinking(msgspec.Struct, frozen=True, array_like=True):
    """Reasoning before a reply."""

    opener: Terminals
    closer: Terminals
    is_open: bool
    """True if it has begun in the prompt; otherwise the reply may begin with it."""
    budget: ThinkingBudget | None = None
    """None: the model decides when it ends."""
    answer_begin: Terminals = ()
    """Precedes what follows the reasoning."""


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """The grammar that constrains a reply. The sender has had it checked; the engine does not."""

    kind: Literal["json_schema", "regex", "lark", "gbnf", "calls"]
    text: str
    """JSON of a schema or a CallGrammar, Rust's regular expression of a whole reply, Lark, or GBNF until its check."""
    thinking: Thinking | None = None
    """Reasoning that may precede the text of the grammar; None: none."""
    matcher_bytes: int = 0
    """Memory of its matcher at the start, as its check measured it."""


class AddRequest(Message, frozen=True):
    """One sequence to generate, or one text to embed."""

    request_id: RequestId
    prompt_token_ids: list[int]
    sampling: EngineSamplingParams
    priority: int = 0
    cache_salt: str | None = None
    grammar: Grammar | None = None
    text_pair_start: int | None = None
    """The first token of the second text of a pair, for a cross-encoder that marks it; None for a single text."""
    adapter: int = 0
    """Number of the adapter; 0: none."""
    prediction_token_ids: list[int] = []
    """The client's prediction of the reply; drafts are taken from it."""
    key_name: str = ""
    """Name of the API key, between which the policy `fair` shares the engine; empty: the key has none, or there is none."""
    images: list[PromptImage] = []
    """In the order of their tokens, which do not overlap."""
    rope_positions: RopePositions | None = None
    """None: each token's position is its place in the text."""
    prompt_embeds: list[PromptEmbeds] = []
    """In the order of their tokens; empty, or all of the prompt, whose token ids have no meaning then."""
    returns_routed_experts: bool = False
    """True: outputs have the experts that the request's tokens chose."""


class Abort(Message, frozen=True):
    """Stop these requests. `finish_reason` of their terminal message is "abort"."""

    request_ids: list[RequestId]


CommandName = Literal[
    "reset_prefix_cache",
    "start_profile",
    "stop_profile",
    "dump_flight_record",
    "pause",
    "resume",
    "sleep",
    "wake_up",
    "update_weights",
    "engine_state",
    "load_adapter",
    "unload_adapter",
]
PauseMode = Literal["keep", "wait", "abort"]
"""Running requests are kept, awaited, or ended with an error when steps pause."""


class CommandOptions(msgspec.Struct, frozen=True, array_like=True):
    """Arguments of a command; each command uses some of them."""

    mode: PauseMode = "keep"
    model: str = ""
    """For `update_weights`: a folder, a GGUF file or a hub id."""
    adapter: str = ""
    """For `load_adapter` and `unload_adapter`: the adapter's name."""
    source: str = ""
    """For `load_adapter`: a folder or a hub id."""
    sleep_level: int = 1
    """For `sleep`. 1: a copy of the weights stays in host memory; 2: no copy."""
    tensors: str = ""
    """For `update_weights` without a `model`: a safetensors file with tensors that replace those of the same names."""


class EngineState(msgspec.Struct, frozen=True, array_like=True):
    """The state that commands change."""

    weight_version: int = 0
    """Number of updates of the weights since the engine's start."""
    is_paused: bool = False
    is_sleeping: bool = False
    flight_record: str = ""
    """Path of the last record that a command has written."""


class Command(Message, frozen=True):
    """A command of the server's operator; answered by one `CommandDone`."""

    command_id: int
    """Chosen by the client."""
    name: CommandName
    options: CommandOptions = CommandOptions()


class StartupProgress(Message, frozen=True):
    """`done` of `total` units in a start-up phase ("load", "compile", ...)."""

    phase: str
    done: int
    total: int
    detail: str = ""


class EmbeddingInfo(msgspec.Struct, frozen=True, array_like=True):
    """Properties of a model that embeds."""

    size: int  # of a vector
    pooling: Pooling
    normalizes: bool
    """True if its vectors should have length 1. The engine does not normalise them."""
    prompts: dict[str, str] = {}
    """Texts that a request may have put before its own, by name; `default_prompt` is the name for those that name none."""
    default_prompt: str | None = None
    lowers_texts: bool = False
    labels: tuple[str, ...] = ()
    """Names of the labels of a classifier, whose vectors are their logits; a cross-encoder has one, of which each text is a pair."""
    activation: LabelActivation = "none"
    """Function from logits to scores or probabilities. The engine does not apply it."""

    @property
    def scores_pairs(self) -> bool:
        """True for a cross-encoder."""
        return len(self.labels) == 1


class ModelInfo(msgspec.Struct, frozen=True, array_like=True):
    """Properties of the loaded model that the API process needs."""

    vocab_size: int
    max_model_len: int
    num_kv_blocks: int
    block_size: int
    max_num_seqs: int
    """Requests that can run at the same time."""
    kv_dtype: str
    platform: str
    num_devices: int
    fingerprint: str
    """8 hex digits over weights' identity, dtype, mesh and versions: part of `system_fingerprint`."""
    startup: StartupReport = StartupReport()
    embedding: EmbeddingInfo | None = None
    """Set if the engine embeds; None: it generates."""
    sampling_defaults: dict[str, int | float] = {}
    """The model's defaults of fields of EngineSamplingParams."""
    windows: tuple[tuple[int, int], ...] = ()
    """Tokens and pages of each sliding window whose layers keep only the window's pages."""
    num_state_slots: int = 0
    """Slots of recurrent states; 0 for a model without recurrent layers."""
    images: ImageInfo | None = None
    """None: the model reads text only, or is served for text only."""
    logprobs_mode: LogprobsMode = "raw_logprobs"
    """Mode of the log-probabilities of generated tokens."""
    prompt_embeds: PromptEmbedsInfo | None = None
    """None: prompts are tokens."""
    routed_experts: RoutedExpertsInfo | None = None
    """None: the engine does not return the experts that tokens chose."""
    work: ModelWork | None = None
    """None: it is not known."""
    kv_cache_bytes: int = 0
    """Bytes of the KV cache over all devices."""


class Ready(Message, frozen=True):
    """The engine serves requests from now on."""

    model_info: ModelInfo


class StartupFailed(Message, frozen=True):
    """The reason of a failed start in one line; the engine process then exits with code 2."""

    message: str


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probability of the chosen token, and of the most likely ones, most likely first."""

    logprob: float
    top_token_ids: list[int]
    top_logprobs: list[float]
    rank: int | None = None
    """1 + the number of tokens that are more likely; for prompt tokens only."""


class ErrorInfo(msgspec.Struct, frozen=True, array_like=True):
    """An error of `errors.REQUEST_ERRORS`, by class name."""

    error_class: str
    message: str
    param: str | None = None
    code: str | None = None

    @property
    def is_rate_limit(self) -> bool:
        """True if the engine rejected the request because its queue is full: nothing of it was computed."""
        return self.error_class == "RateLimitError"


ENGINE_STOPPED: Final = "engine_stopped"
"""Code of the error of requests that end because the engine does."""
STOPPED: Final = "The engine stopped while the request was running."
"""Message of that error, if the engine was not asked to stop."""


class RequestOutput(msgspec.Struct, frozen=True, array_like=True):
    """Output of one request from one step."""

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
    """Number of preemptions so far. Set on every output."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """The next of the prompt's, which begin at its second token. The last come with the first output token. If the weights change
    before it, all come again, and the newest of each token counts."""
    vector: bytes | None = None
    """The text's embedding: float32, little-endian, not normalised."""
    num_accepted_tokens: int = 0
    """Draft tokens that were right so far. Set on every output, like the next field."""
    num_rejected_tokens: int = 0
    weight_version: int = 0
    """Version of the weights that computed `token_ids`."""
    routed_experts: bytes | None = None
    """Experts of the next tokens that were computed, prompt and reply, if the request wants them: `[tokens, L, k]` as
    `RoutedExpertsInfo` says, little-endian."""


class StepOutputs(Message, frozen=True):
    """All outputs of one engine step: one message per step, not one per token."""

    outputs: list[RequestOutput]
    stats: EngineStats | None = None


class Heartbeat(Message, frozen=True):
    """A sign of life, sent if there was no other message for a while."""

    stats: EngineStats | None = None
    """Set for the one client that gets the statistics."""


class PagesChanged(Message, frozen=True):
    """Pages that the prefix cache has gained and lost, by their hashes (`kv/block_table.HashChain`).

    Sent only if `EngineSpec.publishes_pages`; after `Ready` with all pages. Changes arrive before the outputs of the step
    that made them, so the pages of a request are known when its terminal message arrives.
    """

    added: list[bytes]
    removed: list[bytes] = []


class LoadedAdapter(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter that requests may use."""

    name: str
    source: str
    number: int
    """`AddRequest.adapter` of its requests; `types.place_of` is its place among the matrices."""


class AdaptersChanged(Message, frozen=True):
    """All adapters that requests may use from now on; after `Ready`, and before the `CommandDone` of a change."""

    adapters: list[LoadedAdapter]


class CommandDone(Message, frozen=True):
    """The end of a `Command`."""

    command_id: int
    error: ErrorInfo | None = None
    """The reason of a failure; None: the command was run."""
    state: EngineState = EngineState()
    """The state after the command."""


ToEngine = Hello | AddRequest | Abort | Command
FromEngine = (
    StartupProgress | Ready | StartupFailed | StepOutputs | Heartbeat | CommandDone | PagesChanged | AdaptersChanged
)
