"""From engine outputs to output deltas of one choice: text, stop strings, parsing, log-probabilities, ends, metrics.

Streamed and plain replies are made of the same deltas, so their texts are the same by construction.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxserve.frontend.choices.content_tokens import ContentToken, ContentTokens, PromptTokens, ScoredToken, SentTokens
from jaxserve.frontend.choices.spans import REQUEST_SPAN, EndedChoice
from jaxserve.frontend.errors import request_error
from jaxserve.frontend.parsers.events import Event, merged
from jaxserve.frontend.parsers.output_format import ParserSpec
from jaxserve.frontend.parsers.parser import OutputParser
from jaxserve.frontend.routed_experts import ExpertParts
from jaxserve.ipc.messages import AddRequest, RequestOutput, TokenLogprobs
from jaxserve.ipc.routed_experts import RoutedExpertsInfo
from jaxserve.metrics import Metrics
from jaxserve.tokenizer.detokenizer import Delta, IncrementalDetokenizer, TextOffsets
from jaxserve.tokenizer.tokenizer import Tokenizer


class ChoiceTimes:
    """Times from the encoded prompt to the last token, in seconds of the monotonic clock."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._span = REQUEST_SPAN.get()
        self.submitted_s = time.monotonic()
        self.first_token_s: float | None = None
        self.last_token_s = self.submitted_s
        self.queue_s: float | None = None
        """Time from arrival in the engine to the first step."""

    def record_tokens(self, output: RequestOutput) -> None:
        """Record the arrival of an output."""
        if not output.token_ids:
            return
        now = time.monotonic()
        if self.first_token_s is None:
            self.first_token_s = now
            self.queue_s = output.queue_seconds
            self._metrics.observe("time_to_first_token_seconds", now - self.submitted_s)
        else:
            self._metrics.observe("inter_token_latency_seconds", (now - self.last_token_s) / len(output.token_ids))
        self.last_token_s = now

    def abandon(self, request: AddRequest, *, num_tokens: int, num_cached: int) -> None:
        """Count a choice whose client left before its end."""
        self._metrics.inc("request_success", finished_reason="abort")
        self._trace(request, "abort", num_tokens, num_cached)

    def _trace(self, request: AddRequest, reason: str, num_tokens: int, num_cached: int) -> None:
        if self._span is not None:
            choice = EndedChoice(
                model_name=self._metrics.model_name,
                request=request,
                submitted_s=self.submitted_s,
                queue_s=self.queue_s,
                first_token_s=self.first_token_s,
                ended_s=time.monotonic(),
                num_tokens=num_tokens,
                num_cached_tokens=num_cached,
                finish_reason=reason,
            )
            self._span.add_choice(choice)

    def record_end(self, output: RequestOutput, reason: str, request: AddRequest, *, num_tokens: int) -> None:
        """Record the last output of a choice with `num_tokens` generated tokens."""
        metrics, now = self._metrics, time.monotonic()
        num_prompt, num_cached = len(request.prompt_token_ids), output.num_cached_tokens
        self._trace(request, reason, num_tokens, num_cached)
        metrics.inc("request_success", finished_reason=reason)
        if output.error is not None and output.error.is_rate_limit:
            return
        metrics.observe("e2e_request_latency_seconds", now - self.submitted_s)
        metrics.observe("request_prompt_tokens", num_prompt)
        metrics.observe("request_generation_tokens", num_tokens)
        metrics.observe("request_params_max_tokens", request.sampling.max_tokens)
        metrics.observe("request_num_preemptions", output.num_preemptions)
        metrics.inc("prompt_tokens_cached", num_cached)
        if self.first_token_s is None:
            return
        num_computed = num_prompt - num_cached
        metrics.inc("prompt_tokens_by_source", num_computed, source="local_compute")
        metrics.inc("prompt_tokens_by_source", num_cached, source="local_cache_hit")
        decode_s = self.last_token_s - self.first_token_s
        metrics.observe("request_decode_time_seconds", decode_s)
        metrics.observe("request_prefill_kv_computed_tokens", num_computed)
        if num_tokens > 1:
            metrics.observe("request_time_per_output_token_seconds", decode_s / (num_tokens - 1))
        if self.queue_s is not None:
            prefill_s = max(0.0, self.first_token_s - self.submitted_s - self.queue_s)
            metrics.observe("request_queue_time_seconds", self.queue_s)
            metrics.observe("request_prefill_time_seconds", prefill_s)
            metrics.observe("request_inference_time_seconds", prefill_s + decode_s)


@dataclass(slots=True)
class OutputDelta:
    """New text of one choice, or its end."""

    index: int
    text: str
    events: list[Event] | None = None
    """Events of the parser, which may lag `text`. None without a parser: `text` is content."""
    tokens: list[ScoredToken] = field(default_factory=list)
    """Tokens of `text`, if log-probabilities were requested."""
    content: list[ContentToken] = field(default_factory=list)
    """Tokens of `text` that are content; the token that ended the text is not."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt: PromptTokens | tuple[()] = ()
    """Tokens of the prompt, in the first delta of a choice, if their log-probabilities were requested."""
    token_ids: Sequence[int] = ()
    """Ids of the tokens that no stop string can cut off any more, if they were requested; `tokens` are then the same ones."""
    routed_experts: np.ndarray | None = None
    """Experts `[tokens, layers, top_k]` of all tokens that were computed, in the last delta of a choice, if requested."""

    @property
    def content_events(self) -> list[Event]:
        """Events of the parser, or the text as content."""
        if self.events is not None:
            return self.events
        return [Event("content", self.text, self.text)] if self.text else []


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Options that turn tokens of a request's choices into text."""

    stop: Sequence[str] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    is_prompt_only: bool = False
    """True: the one token that the engine generates is dropped."""
    returns_token_ids: bool = False
    """True: deltas have the ids of their tokens."""
    routed_experts: RoutedExpertsInfo | None = None
    """Sizes of the experts that the last delta has; None: it has none."""
    spec: ParserSpec = field(default_factory=ParserSpec)


class ChoiceStream:
    """One choice: takes engine outputs, returns output deltas."""

    def __init__(self, index: int, request: AddRequest, options: OutputOptions, metrics: Metrics) -> None:
        self.index = index
        self.request = request
        self.num_tokens = 0
        """Number of generated tokens up to and with the one that ended the text."""
        self.num_reasoning_tokens = 0
        """Number of those inside reasoning and its markers."""
        self.num_cached_tokens = 0
        self.num_accepted_tokens = self.num_rejected_tokens = 0
        """Numbers of draft tokens."""
        self.num_tokens_of_weights: dict[int, int] = {}
        """Numbers of generated tokens by the version of the weights that computed them, in order."""
        self.is_finished = False
        self.times = ChoiceTimes(metrics)
        self._options = options
        self._detokenizer: IncrementalDetokenizer
        self._parser: OutputParser | None = None
        self._max_calls = sys.maxsize if options.spec.max_calls is None else options.spec.max_calls
        self._num_calls = 0
        """Number of calls that were begun, up to one too many."""
        self._events: list[Event] = []
        self._stop: str | None = None
        self._unsent: list[ScoredToken] = []
        self._sent: SentTokens | None = None
        self._content = None if request.sampling.num_top_logprobs is None else ContentTokens()
        self._prompt_scores: list[TokenLogprobs] = []
        self._has_sent_prompt = request.sampling.num_prompt_logprobs is None
        self._experts = None if options.routed_experts is None else ExpertParts(options.routed_experts)

    def open(self, tokenizer: Tokenizer) -> None:
        """Make the detokenizer and the parser; called once the request is submitted, so that the engine need not wait."""
        options = self._options
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            self.request.prompt_token_ids,
            options.stop,
            skip_special_tokens=options.skip_special_tokens,
            shown_token_ids=options.spec.shown_token_ids,
            include_stop=options.include_stop,
            min_tokens=self.request.sampling.min_tokens,
        )
        if options.returns_token_ids:
            offsets = TextOffsets(
                tokenizer,
                self.request.prompt_token_ids,
                skip_special_tokens=options.skip_special_tokens,
                shown_token_ids=options.spec.shown_token_ids,
            )
            self._sent = SentTokens(offsets if any(options.stop) else None)
        self._parser = options.spec.new_parser()

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    def push(self, outputs: list[RequestOutput]) -> OutputDelta | None:
        """Take outputs in order; return None if none of their text is certain yet, nor an id of a token that was requested.

        Raises the engine's RequestError.
        """
        texts = []
        for output in outputs:
            self.num_cached_tokens = output.num_cached_tokens
            self.num_accepted_tokens = output.num_accepted_tokens
            self.num_rejected_tokens = output.num_rejected_tokens
            if output.finish_reason in ("error", "abort"):
                self._finish(output, "error")
                raise request_error(output.error)
            self._prompt_scores += output.prompt_logprobs or ()
            if self._experts is not None:
                self._experts.add(output.routed_experts)
            self.times.record_tokens(output)
            if self._options.is_prompt_only and output.token_ids:
                self._count_weights(output, 0)
                self._finish(output, "length")
                delta = OutputDelta(self.index, "", finish_reason="length")
                if self._experts is not None:
                    delta.routed_experts = self._experts.take(self.num_prompt_tokens, 0)
                self._add_prompt(delta)
                return delta
            texts.append(self._take_tokens(output))
            if self._has_all_calls:
                return self._end(output, texts, "stop", self._stop)
            if output.finish_reason is not None and self._stop is None:
                rest = self._detokenizer.finish()
                texts.append(rest.text)
                if self._content is not None:
                    self._content.push((), len(rest.text))
                if self._sent is not None:
                    self._sent.push((), len(rest.text))
                self._read(rest.text)
                self._stop = rest.stop
            if self._stop is not None:
                return self._end(output, texts, "stop", self._stop)
            if output.finish_reason is not None:
                return self._end(output, texts, output.finish_reason, output.stop_token_id)
        text = "".join(texts)
        has_text = bool(text if self._parser is None else self._events)
        has_ids = self._sent is not None and self._sent.has_released
        return self._take_delta(text) if has_text or has_ids else None

    def _count_weights(self, output: RequestOutput, num_tokens: int) -> None:
        if output.token_ids:
            counts, version = self.num_tokens_of_weights, output.weight_version
            counts[version] = counts.get(version, 0) + num_tokens

    def abandon(self) -> None:
        """Count a choice whose client left before its end."""
        if not self.is_finished:
            self.is_finished = True
            self.times.abandon(self.request, num_tokens=self.num_tokens, num_cached=self.num_cached_tokens)

    def _end(self, output: RequestOutput, texts: list[str], reason: str, detail: str | int | None) -> OutputDelta:
        self._finish(output, reason)
        if self._parser is not None:
            self._keep(self._parser.finish())
        delta = self._take_delta("".join(texts))
        delta.finish_reason, delta.stop_reason = reason, detail
        if self._experts is not None:
            delta.routed_experts = self._experts.take(self.num_prompt_tokens, self.num_tokens)
        return delta

    def _finish(self, output: RequestOutput, reason: str) -> None:
        self.is_finished = True
        self.times.record_end(output, reason, self.request, num_tokens=self.num_tokens)

    def _take_delta(self, text: str) -> OutputDelta:
        """Return a delta of this text with all events and tokens since the last one."""
        events = None
        if self._parser is not None:
            events, self._events = merged(self._events), []
        unsent, self._unsent = self._unsent, []
        delta = OutputDelta(self.index, text, events, unsent, [] if self._content is None else self._content.take())
        if self._sent is not None:
            sent = self._sent.take(is_all=self.is_finished and self._stop is None)
            delta.token_ids = [token.token_id for token in sent]
            delta.tokens = sent if self.request.sampling.num_top_logprobs is not None else []
        self._add_prompt(delta)
        return delta

    def _add_prompt(self, delta: OutputDelta) -> None:
        """Add the prompt's tokens to the first delta, if they were requested."""
        if not self._has_sent_prompt:
            self._has_sent_prompt = True
            # They come again after an update of the weights.
            newest = self._prompt_scores[-(self.num_prompt_tokens - 1) :]
            delta.prompt = PromptTokens(self.request.prompt_token_ids, newest)

    def _take_tokens(self, output: RequestOutput) -> str:
        """Return the text of the output's tokens; a token that ended the request has none unless `include_stop`."""
        shown = output.token_ids
        if output.finish_reason == "stop" and not self._options.include_stop:
            shown = shown[:-1]
        scored = list(map(ScoredToken, output.token_ids, output.logprobs)) if output.logprobs is not None else []
        delta = (
            self._detokenizer.push(shown)
            if self._parser is None
            else self._push_one_by_one(self._parser, shown, scored)
        )
        self._stop = delta.stop
        is_cut = delta.stop is not None or self._has_all_calls
        num_taken = delta.num_tokens if is_cut else len(output.token_ids)
        self.num_tokens += num_taken
        self._count_weights(output, num_taken)
        if self._sent is None:
            self._unsent += scored[:num_taken]
        else:
            tokens = scored or [ScoredToken(token_id, None) for token_id in output.token_ids]
            self._sent.push(tokens[:num_taken], len(delta.text))
        if self._parser is None and self._content is not None:
            self._content.add(scored[: min(num_taken, len(shown))])
        return delta.text

    def _push_one_by_one(self, parser: OutputParser, token_ids: Sequence[int], scored: Sequence[ScoredToken]) -> Delta:
        """Push single tokens, so that the count of reasoning tokens does not depend on how many come at a time."""
        texts: list[str] = []
        num_tokens = 0
        stop = None
        for i, token_id in enumerate(token_ids):
            was_reasoning = parser.is_reasoning
            delta = self._detokenizer.push([token_id])
            texts.append(delta.text)
            if self._content is not None and scored:
                self._content.push(scored[i : i + 1], len(delta.text))
            self._read(delta.text)
            num_tokens += delta.num_tokens
            self.num_reasoning_tokens += was_reasoning or parser.is_reasoning
            stop = delta.stop
            if stop is not None or self._has_all_calls:
                break
        return Delta("".join(texts), num_tokens, stop)

    @property
    def _has_all_calls(self) -> bool:
        """True once the reply has made the last call that it may, or begins another one."""
        num_read = 0 if self._parser is None else self._parser.num_calls_read
        return max(num_read, self._num_calls - 1) >= self._max_calls

    def _read(self, text: str) -> None:
        if self._parser is not None and text:
            self._keep(self._parser.feed(text))

    def _keep(self, events: list[Event]) -> None:
        for event in events:
            self._num_calls += event.kind == "name"
            is_over = self._num_calls == self._max_calls and self._has_all_calls  # a stop string held back what follows
            if self._num_calls > self._max_calls or (is_over and event.kind in ("content", "reasoning")):
                event = Event("syntax", "", event.source)  # dropped, but it ends the tokens before it
            if self._content is not None:
                self._content.read(event)
            if event.kind != "syntax":
                self._events.append(event)
