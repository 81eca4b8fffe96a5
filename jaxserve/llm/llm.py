"""`LLM`: a model in an engine process, used from Python without a server."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import Any, Final, Literal, get_args

from jaxserve.checkpoint.safetensors_file import ArrayLike
from jaxserve.checkpoint.source import resolve_model
from jaxserve.config import Config
from jaxserve.errors import ConfigError, RequestError, invalid
from jaxserve.frontend.checks import shorten
from jaxserve.frontend.engine_client.client import EngineClient
from jaxserve.frontend.engine_client.connection import EngineConnection
from jaxserve.frontend.frontend import Frontend
from jaxserve.frontend.peers import PeerProcesses
from jaxserve.frontend.tokenization import tokenization
from jaxserve.ipc.address import folder_of, own_address
from jaxserve.ipc.engine_spec import EngineSpec, FakeOptions
from jaxserve.ipc.messages import CommandName, CommandOptions, PauseMode, StartupProgress
from jaxserve.ipc.transport import ClientSocket
from jaxserve.llm.background import Background
from jaxserve.llm.embedding import classify_all, embed_all, score_all
from jaxserve.llm.generation import Work, chat_work, replayed, run_all, text_work
from jaxserve.llm.progress import has_terminal, progress
from jaxserve.llm.prompts import (
    Prompt,
    check_text,
    listed_conversations,
    listed_input,
    listed_prompt,
    listed_prompts,
    listed_texts,
    params_of_each,
)
from jaxserve.llm.results import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from jaxserve.llm.sampling_params import SamplingParams
from jaxserve.llm.weight_arrays import arrays_file
from jaxserve.runtime.engine_process import EngineProcess, check_tokenizer, engine_process, wait_dead, wait_started
from jaxserve.runtime.environment import caches_environment, load_config
from jaxserve.runtime.models.model_runtime import install, make_frontend, tokenizer_of
from jaxserve.runtime.settings import ENGINE_SECTIONS, SETTINGS, closest
from jaxserve.runtime.startup_display import StartupDisplay
from jaxserve.runtime.tasks import in_thread, running

Message = dict[str, Any]
"""A message of OpenAI's API: `{"role": "user", "content": "..."}`."""

_SERVER_SETTINGS: Final = {
    "tool_call_parser",
    "reasoning_parser",
    "log_level",
    "log_format",
    "startup_timeout",
    "stall_timeout",
    "uds_dir",
}
_SECTIONS: Final = (*ENGINE_SECTIONS, "structured", "limits")
_EXCLUDED: Final = {
    "served_model_name",
    "max_body_values",
    "max_prompts",
    "max_inputs",
    "max_input_tokens",
    "max_queued_requests",
    "max_queued_tokens",
    "replicas",
    "routing",
    "max_imbalance_tokens",
    "publish_pages",
}
"""Settings of these sections that have no effect without a server, or that `LLM` sets: it has one engine."""
_UNLIMITED: Final = 2**31 - 1
"""The caller waits for all prompts: none is rejected because the queue is full."""
_UNLIMITED_BYTES: Final = 1 << 62
"""Inputs and results of a call are the caller's: no prompt is rejected for the memory that those of others take."""
_MAX_IMAGE_SIZE: Final = 1 << 30
"""Bytes of an image that a caller hands over, whose pixels are bounded: a picture without losses may be larger than a photo's file."""
ACCEPTED: Final = (
    frozenset(setting.name for setting in SETTINGS if setting.section in _SECTIONS or setting.name in _SERVER_SETTINGS)
    - _EXCLUDED
)


class LLM(contextlib.AbstractContextManager["LLM"]):
    """A loaded model in a separate engine process, the same one that the server runs; this process imports no jax.

    Use it as a context manager, or call `close`; the end of the program ends the engine, too. Several threads may use
    one LLM: their prompts share batches.
    """

    def __init__(self, model: str | PathLike[str] | None = None, **settings: object) -> None:
        """Load `model` (None: the default model) with settings of docs/reference/config.md, e.g. `max_model_len=4096`.

        Settings about HTTP are rejected; variables `JAXSERVE_...` are not read. Raises ConfigError or another StartupError;
        then no process is left.
        """
        config = llm_config(None if model is None else str(model), settings)
        self._engine = _started(config, "local", FakeOptions())
        self._finalizer = weakref.finalize(self, self._engine.stop)

    @classmethod
    def from_config(
        cls, config: Config, *, executor: Literal["local", "fake"] = "local", fake: FakeOptions | None = None
    ) -> LLM:
        """Return an LLM of a config. `executor="fake"` runs an engine without a model, for tests."""
        llm = cls.__new__(cls)
        llm._engine = _started(config, executor, fake or FakeOptions())
        llm._finalizer = weakref.finalize(llm, llm._engine.stop)
        return llm

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | None = None,
        progress_bar: bool = True,
    ) -> list[RequestOutput]:
        """Continue one prompt or many (texts, token ids or embeddings); returns results in the order of the prompts.

        Embeddings are {"prompt_embeds": array}, an array of tokens x width numbers of numpy, JAX or torch, with the setting
        `enable_prompt_embeds`.

        sampling_params: one for all prompts or one for each; default: `get_default_sampling_params()`. adapter: the name
        of an adapter of the setting `lora_modules`.

        All prompts are checked before any runs: an invalid prompt or option raises InvalidRequestError with a note that
        has the prompt's index. Raises UnavailableError or InternalError if the engine fails.
        """
        listed = listed_prompts(prompts, listed_input)
        return self._run(partial(text_work, adapter=adapter), listed, sampling_params, progress_bar)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        continue_final_message: bool = False,
        adapter: str | None = None,
        progress_bar: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or many in the model's chat format; otherwise like `generate`.

        messages: as in OpenAI's API; images also as parts {"type": "image_pil", "image_pil": an image of Pillow}. tools,
        tool_choice: as there, too. Tool calls and reasoning are parsed as by the server: the result has them
        as `tool_calls` and `reasoning`, and the content as `text`.
        """
        listed = listed_conversations(messages)
        given = {"tools": tools, "tool_choice": tool_choice, "chat_template_kwargs": chat_template_kwargs}
        template: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        make = partial(chat_work, adapter=adapter, continue_final_message=continue_final_message, **template)
        return self._run(make, listed, sampling_params, progress_bar)

    def replay(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        *,
        adapter: str | None = None,
        progress_bar: bool = True,
    ) -> list[list[float]]:
        """Return the log-probability of each token of `completions`, given its prompt and the tokens before it.

        Both are token ids. The values are raw, in every `logprobs_mode`: before temperature, cuts and penalties. `generate`
        reports the same ones for the same tokens and weights if the mode is raw_logprobs. With the setting `deterministic` they are equal bit for bit. A prompt and
        its completion may be one token shorter than `max_model_len` together. Raises what `generate` raises.
        """
        if len(prompts) != len(completions) or not all(len(prompt) for prompt in prompts):
            raise invalid("prompts", "must have as many entries as `completions`, each of one token or more")
        whole = [[*map(int, prompt), *map(int, tokens)] for prompt, tokens in zip(prompts, completions, strict=True)]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        results = self.generate(whole, params, adapter=adapter, progress_bar=progress_bar)
        return [replayed(result, len(prompt)) for prompt, result in zip(prompts, results, strict=True)]

    def embed(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
        progress_bar: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Return the vectors of one prompt or many (texts or token ids). Needs an encoder, or `task="embed"`.

        The options are those of /v1/embeddings. Order, checks and errors are those of `generate`.
        """
        listed = listed_prompts(prompts, listed_prompt)
        with progress(len(listed), progress_bar) as on_done:
            return self._engine.call(
                lambda frontend: embed_all(
                    frontend, listed, dimensions, normalize, truncate_prompt_tokens, prompt_name, on_done
                )
            )

    def classify(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        progress_bar: bool = True,
    ) -> list[ClassificationRequestOutput]:
        """Return the label of one prompt or many (texts or token ids), with the probabilities of all. Needs a classifier."""
        listed = listed_prompts(prompts, listed_prompt)
        with progress(len(listed), progress_bar) as on_done:
            return self._engine.call(lambda frontend: classify_all(frontend, listed, truncate_prompt_tokens, on_done))

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
        progress_bar: bool = True,
    ) -> list[ScoringRequestOutput]:
        """Return the similarity of one text to each of `text_2`, or of pairs of texts. Needs a model that embeds.

        instruction: for a reranker whose chat template shows a system message: what makes a document fit a query."""
        first, second = listed_texts(text_1, "text_1"), listed_texts(text_2, "text_2")
        with progress(len(first) + len(second), progress_bar) as on_done:
            return self._engine.call(
                lambda frontend: score_all(frontend, first, second, truncate_prompt_tokens, instruction, on_done)
            )

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default of `generate` and `chat`: SamplingParams with the checkpoint's recommended values."""

        async def ask(frontend: Frontend) -> dict[str, int | float]:
            return frontend.require_generation().sampling_defaults

        known: dict[str, Any] = self._engine.call(ask)
        return SamplingParams(**known)

    def update_weights(
        self,
        model: str | PathLike[str] | None = None,
        *,
        arrays: Mapping[str, ArrayLike] | None = None,
        mode: PauseMode = "keep",
    ) -> int:
        """Replace the weights by others of the same shapes. Nothing is compiled.

        model: a folder, a GGUF file or a hub id. arrays, instead: arrays of this process, of numpy or JAX, by the names
        that tensors have in the model's Hugging Face directory; weights whose names are absent stay. They go to the
        engine through shared memory, or through a temporary file if that has no space.

        Steps go on while the weights are read. Then running calls of other threads are treated by `mode`. keep: they
        continue with the new weights, which compute the tokens so far again; wait: they end first; abort: they raise
        UnavailableError. Cached prefixes of the old weights are forgotten.

        Returns the new version. Raises InvalidRequestError if the weights do not fit; then the old ones stay.
        """
        if (model is None) == (arrays is None):
            raise invalid("model", "must be given, or `arrays` instead of it")
        if mode not in get_args(PauseMode):
            raise invalid("mode", f"must be one of {', '.join(get_args(PauseMode))}, got {shorten(mode)}")
        check_text(str(model), "model")
        with arrays_file(arrays) if arrays is not None else contextlib.nullcontext("") as tensors:
            options = CommandOptions(mode=mode, model="" if model is None else str(model), tensors=str(tensors))
            return self._engine.call(partial(_run_command, name="update_weights", options=options))

    def sleep(self, level: int = 1) -> None:
        """Give the memory of the weights and the KV cache back until `wake_up`. Running calls wait, others raise UnavailableError.

        level: 1 keeps a copy of the weights in host memory; with 2 they are read again, unless `update_weights` follows.
        """
        if level not in (1, 2):
            raise invalid("level", f"must be 1 or 2, got {shorten(level)}")
        self._engine.call(partial(_run_command, name="sleep", options=CommandOptions(sleep_level=int(level))))

    def wake_up(self) -> None:
        """End `sleep`: bring the weights back, and an empty KV cache."""
        self._engine.call(partial(_run_command, name="wake_up", options=CommandOptions()))

    def close(self) -> None:
        """End the engine. Running calls of other threads raise UnavailableError; later calls of `close` have no effect."""
        self._finalizer()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(
        self,
        make: Callable[[Frontend, Any, SamplingParams], Coroutine[Any, Any, Work]],
        prompts: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        progress_bar: bool,
    ) -> list[RequestOutput]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = params_of_each(sampling_params, len(prompts))

        async def work(frontend: Frontend) -> list[RequestOutput]:
            works = []
            for i, (prompt, options) in enumerate(zip(prompts, params, strict=True)):
                try:
                    works.append(await make(frontend, prompt, options))
                except RequestError as error:
                    error.add_note(f"in prompt {i} of {len(prompts)}, counted from 0")
                    raise
            return await run_all(frontend, works, on_done)

        with progress(len(prompts), progress_bar) as on_done:
            return self._engine.call(work)


async def _run_command(frontend: Frontend, name: CommandName, options: CommandOptions) -> int:
    return (await frontend.client.command(name, options)).weight_version


def llm_config(model: str | None, settings: Mapping[str, object]) -> Config:
    """Return the config of settings named as in a config file. Of the environment it reads the folder of caches alone; the hub and JAX read theirs.

    Raises ConfigError for a setting that is unknown or about HTTP, and for an invalid value.
    """
    for name in settings:
        if name not in ACCEPTED:
            raise ConfigError(f"LLM(..., {name}=...): not a setting of an engine{closest(name, ACCEPTED)}")
    own = {"log_level": "warning", "max_image_memory": _UNLIMITED_BYTES, "max_image_size": _MAX_IMAGE_SIZE}
    queue = {"max_queued_requests": _UNLIMITED, "max_queued_tokens": _UNLIMITED, "max_reply_memory": _UNLIMITED_BYTES}
    given = {**own, **settings, **queue}
    return load_config(flags=given if model is None else {"model": model, **given}, environ=caches_environment())


def _started(config: Config, executor: Literal["local", "fake"], fake: FakeOptions) -> Background[Frontend]:
    """Start an engine, and show its progress on stderr if it is a terminal."""
    with StartupDisplay() if has_terminal() else contextlib.nullcontext() as display:
        on_progress = display.show if display is not None else lambda progress: None
        engine = Background(engine_session(config, executor, fake, on_progress))
        engine.start()
    return engine


@contextlib.asynccontextmanager
async def engine_session(
    config: Config,
    executor: Literal["local", "fake"],
    fake: FakeOptions,
    on_progress: Callable[[StartupProgress], None],
) -> AsyncIterator[Frontend]:
    """Yield the frontend of an engine that is ready: a server without a port."""
    with own_address(config.server.uds_dir) as address, tokenization() as tokens:
        frontend = make_frontend(config, PeerProcesses(0, 1, folder_of(address)), tokens, on_progress)
        async with (
            contextlib.aclosing(frontend.grammars),
            contextlib.aclosing(frontend.images),
            _engine(config, address, executor, fake, frontend),
        ):
            yield frontend


@contextlib.asynccontextmanager
async def _engine(
    config: Config, address: str, executor: Literal["local", "fake"], fake: FakeOptions, frontend: Frontend
) -> AsyncIterator[None]:
    """Run the engine process inside the block; requests under way end with an error if it ends."""
    path = await in_thread(lambda: resolve_model(config.model))
    spec = EngineSpec(config=config, model_path=str(path), address=address, executor=executor, fake=fake)
    with contextlib.closing(ClientSocket(address)) as socket:
        async with frontend.client.connected(socket) as connection, engine_process(spec) as engine:
            tokenizer = await in_thread(lambda: tokenizer_of(config, path))
            install(frontend, config, tokenizer, path)
            check_tokenizer(tokenizer, await wait_started(connection, engine), path)
            async with running(_fail_at_end(frontend.client, connection, engine)):
                yield


async def _fail_at_end(client: EngineClient, connection: EngineConnection, engine: EngineProcess) -> None:
    client.fail(await wait_dead(connection, engine))
