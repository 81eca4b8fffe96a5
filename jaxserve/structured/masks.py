"""Advances the grammars of running requests, and makes masks of the tokens that may come next.

Grammars advance in a small pool of threads, since a step takes from 50 microseconds to 30 ms; llguidance releases the
interpreter meanwhile. The scheduler asks whether a mask is ready, and waits a few milliseconds at most.

A new grammar may take seconds to compile. That happens once for all requests that have it, in threads of their own, so that
grammars that are known advance meanwhile.

A request whose grammar is too costly ends with an error; other requests are not affected. Copies of a matcher share the
states of its lexer, and the limit counts those of all copies: a request that meets it continues with a matcher of its own.

A matcher may take hundreds of KB, and many requests may wait: until its first token is chosen, a request has its first
mask and no matcher. Then the matcher is a copy of the kept one at its start, or made anew if that was dropped.
"""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Lock
from typing import Final

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from jaxserve.config import StructuredConfig
from jaxserve.ipc.messages import Grammar
from jaxserve.sampling.bits import pack_bits
from jaxserve.structured.compiling import GrammarError, matcher_error, new_matcher
from jaxserve.structured.memory import resident_bytes

_NUM_THREADS: Final = 4
"""Threads that advance grammars, and as many that compile new ones."""
_MAX_STEP_S: Final = 0.1
"""Processor time for one token; ordinary grammars need a thousandth of it."""
_NUM_KEPT: Final = 32
"""Kept matchers at their start, for requests with the same grammar."""
_MAX_KEPT_BYTES: Final = 64 << 20
"""Largest total memory of kept matchers, before requests added states to them; one that is larger is kept alone."""
_MAX_GROWTH_BYTES: Final = 256 << 20
"""Growth of the process after which no matcher is kept: states that requests add to one may take 100 MB."""
_TOO_MANY_STATES: Final = "too many states"
"""Part of llguidance's error for a lexer at its limit."""


@dataclass(frozen=True, slots=True)
class Start:
    """The start of every request with the same grammar."""

    matcher: LLMatcher
    """Never advanced: requests copy it."""
    mask: np.ndarray | None
    """The tokens that may come first; None if none may."""


class GrammarMasks:
    """The grammars of one engine, on one vocabulary."""

    def __init__(self, load: Callable[[], LLTokenizer], vocab_size: int, config: StructuredConfig) -> None:
        """`load` reads the vocabulary, which takes about a second; the thread that compiles the first grammar calls it.

        `vocab_size`: of the model's logits.
        """
        self._load = load
        self._vocabulary: LLTokenizer | None = None
        self._loading = Lock()
        self.everything = pack_bits(range(vocab_size), vocab_size)
        """The mask that allows all tokens of the model."""
        self._vocab_size = vocab_size
        self._config = config
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
        self._compilers = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="compiler")
        self._compiling: dict[Grammar, Future[None]] = {}
        """The work on new grammars; done when the start is kept."""
        self._starts: OrderedDict[Grammar, Start] = OrderedDict()
        self._num_kept_bytes = 0
        self._grown_from_bytes = resident_bytes()
        """The memory of the process when matchers were dropped last."""
        self._lock = Lock()

    def follow(
        self, grammar: Grammar, allowed_token_ids: Collection[int], *, jump_forward: bool = False
    ) -> GrammarState:
        """Start the grammar of a request, and its first mask. If ids are given, no mask allows others.

        jump_forward: the state returns tokens that the grammar determines, instead of masks for them.
        """
        allowed = pack_bits(allowed_token_ids, self._vocab_size) if allowed_token_ids else None
        return GrammarState(self, grammar, allowed, jump_forward=jump_forward)

    def close(self) -> None:
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def submit(self, state: GrammarState, token: int | None, grammar: Grammar | None) -> Future[None]:
        """Let `state` take a token, or start, in a thread; called by it. grammar: None if it has its matcher."""
        work: Future[None] = Future()
        with self._lock:
            if grammar is None or grammar in self._starts:
                self._threads.submit(self._move, state, token, work)
                return work
            compiling = self._compiling.get(grammar)
            if compiling is None:
                compiling = self._compiling[grammar] = self._compilers.submit(self._compile, grammar)
        compiling.add_done_callback(lambda compiled: self._go_on(compiled, state, token, work))
        return work

    def _go_on(self, compiled: Future[None], state: GrammarState, token: int | None, work: Future[None]) -> None:
        """Let `state` take a token, or start, after its grammar was compiled; then `work` is done."""
        if compiled.cancelled():
            work.cancel()
        elif (error := compiled.exception()) is not None:
            state.fail(error)
            work.set_result(None)
        else:
            self._move(state, token, work)

    def _move(self, state: GrammarState, token: int | None, work: Future[None]) -> None:
        """Let `state` take a token, or start; then `work` is done."""
        if state.move(token):
            work.set_result(None)
        else:
            self._compilers.submit(_restart, state, token, work)

    def _compile(self, grammar: Grammar) -> None:
        """Make the start of requests with this grammar. Raises GrammarError."""
        try:
            self.start_of(grammar)
        finally:
            with self._lock:
                del self._compiling[grammar]

    def _tokenizer(self) -> LLTokenizer:
        with self._loading:
            if self._vocabulary is None:
                self._vocabulary = self._load()
            return self._vocabulary

    def new_matcher(self, grammar: Grammar) -> LLMatcher:
        """Return a matcher at the start that shares no states. Raises GrammarError."""
        return new_matcher(grammar, self._tokenizer(), self._config)

    def copied(self, start: Start) -> LLMatcher:
        """Return a matcher at the start that shares its states."""
        with self._lock:
            return start.matcher.deep_copy()

    def drop(self, grammar: Grammar, start: Start) -> None:
        """Keep `start` no longer, so that the next request compiles its grammar again."""
        with self._lock:
            if self._starts.get(grammar) is start:
                del self._starts[grammar]
                self._num_kept_bytes -= grammar.matcher_bytes

    def mask_of(self, matcher: LLMatcher) -> np.ndarray:
        """Return the tokens that may come next. Raises GrammarError.

        The vocabulary of the tokenizer may be smaller or larger than the model's.
        """
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            raise matcher_error(matcher)
        mask = np.zeros_like(self.everything)
        num_bytes = min(len(bits), mask.nbytes)
        mask.view(np.uint8)[:num_bytes] = bits[:num_bytes]
        mask &= self.everything
        return mask

    def start_of(self, grammar: Grammar) -> Start:
        """Return the start of every request with this grammar. Raises GrammarError."""
        with self._lock:
            start = self._starts.get(grammar)
            if start is not None:
                self._starts.move_to_end(grammar)
                self._bound_growth()
                return start
        matcher = self.new_matcher(grammar)
        with _watched(matcher):
            start = Start(matcher, None if matcher.is_stopped() else self.mask_of(matcher))
        with self._lock:
            if grammar not in self._starts:  # another thread may have made it meanwhile
                self._num_kept_bytes += grammar.matcher_bytes
            self._starts[grammar] = start
            while len(self._starts) > 1 and (len(self._starts) > _NUM_KEPT or self._num_kept_bytes > _MAX_KEPT_BYTES):
                dropped, _ = self._starts.popitem(last=False)
                self._num_kept_bytes -= dropped.matcher_bytes
        return start

    def _bound_growth(self) -> None:
        """Drop all kept matchers, with the states that requests added to them, if the process has grown.

        Call it with the lock. Something else may have grown: then they are compiled again without need.
        """
        now_bytes = resident_bytes()
        if now_bytes - self._grown_from_bytes > _MAX_GROWTH_BYTES:
            self._starts.clear()
            self._num_kept_bytes = 0
            self._grown_from_bytes = now_bytes
        self._grown_from_bytes = min(self._grown_from_bytes, now_bytes)


def _restart(state: GrammarState, token: int | None, work: Future[None]) -> None:
    """Let `state` take a token with a matcher of its own; then `work` is done."""
    state.restart(token)
    work.set_result(None)


@contextlib.contextmanager
def _watched(matcher: LLMatcher) -> Iterator[None]:
    """Raise GrammarError if `matcher` failed in the block, or took too long."""
    started_s = time.thread_time()
    yield
    if matcher.is_error():
        raise matcher_error(matcher)
    if time.thread_time() - started_s > _MAX_STEP_S:
        raise GrammarError("it takes too long to find out which tokens may come next")


class GrammarState:
    """The state of one request's grammar. All but `is_ready` is valid once it is ready."""

    def __init__(
        self, masks: GrammarMasks, grammar: Grammar, allowed: np.ndarray | None, *, jump_forward: bool
    ) -> None:
        self._masks = masks
        self._grammar = grammar
        self._matcher: LLMatcher | None = None
        self._start: Start | None = None
        """The start whose states the matcher shares; None if it shares none."""
        self._taken: list[int] = []
        """The tokens that the matcher has consumed."""
        self._allowed = allowed
        self._jump_forward = jump_forward
        self._jumped: list[int] = []
        """Jump-forward tokens: they come before the one that `mask` is for."""
        self.mask = masks.everything
        """The tokens that may come next: int32 `[W]`, read-only."""
        self.is_terminated = False
        """True if no token may come next."""
        self.error: str | None = None
        """The reason why the grammar cannot be followed any further."""
        self.work = masks.submit(self, None, grammar)

    def wait(self, seconds: float) -> None:
        """Wait until it is ready, at most `seconds`."""
        wait([self.work], seconds)

    @property
    def is_ready(self) -> bool:
        return self.work.done()

    def take_jump_forward(self) -> list[int]:
        """Return the jump-forward tokens. Later calls return none."""
        tokens, self._jumped = self._jumped, []
        return tokens

    def advance(self, token: int) -> None:
        """Take the chosen token; ready again when the next mask is made."""
        self.work.result()
        self.work = self._masks.submit(self, token, self._grammar if self._matcher is None else None)

    def move(self, token: int | None) -> bool:
        """Take a token, or start. Runs in a thread, one call at a time.

        Returns False if it has to `restart`, since the requests with its grammar have made too many states together.
        """
        try:
            if token is None:
                self._set_mask(self._masks.start_of(self._grammar).mask)
                return True
            if self._matcher is None:
                self._start = self._masks.start_of(self._grammar)
                self._matcher = self._masks.copied(self._start)
            self._move(self._matcher, token)
        except Exception as error:  # any error ends this request, since it would be unconstrained without a mask
            if self._start is not None and _TOO_MANY_STATES in str(error):
                self._masks.drop(self._grammar, self._start)
                return False
            self.fail(error)
        return True

    def restart(self, token: int | None) -> None:
        """Take a token with a matcher of its own. Runs in a thread, in place of other calls."""
        assert token is not None, "the first mask needs no copy of a matcher"
        self._start = None
        try:
            self._matcher = self._masks.new_matcher(self._grammar)
            self._consume(self._matcher, self._taken)
            self._move(self._matcher, token)
        except Exception as error:  # as in `move`
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the request with `error`."""
        self.error = str(error) or type(error).__name__

    def _move(self, matcher: LLMatcher, token: int) -> None:
        self._jumped = []
        with _watched(matcher):
            self._consume(matcher, [token])
            if self._jump_forward and not matcher.is_stopped():
                self._jumped = matcher.compute_ff_tokens()
                self._consume(matcher, self._jumped)
            self._set_mask(None if matcher.is_stopped() else self._masks.mask_of(matcher))
        self._taken += [token, *self._jumped]

    def _set_mask(self, mask: np.ndarray | None) -> None:
        """Set the tokens that may come next, if the request allows them; None: none may."""
        self.is_terminated = mask is None
        if mask is not None:
            self.mask = mask if self._allowed is None else mask & self._allowed
            if not self.mask.any():
                raise GrammarError("of the tokens that it allows next, the request allows none")

    def _consume(self, matcher: LLMatcher, tokens: list[int]) -> None:
        if not matcher.consume_tokens(tokens):
            raise matcher_error(matcher) if matcher.is_error() else GrammarError(f"tokens {tokens[:8]} do not fit")
