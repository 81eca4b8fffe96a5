"""The Python API, whole: thread, engine process with a fake model, tokenizer, results, and every kind of end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import jaxserve
from jaxserve import LLM, SamplingParams
from jaxserve.apis.openai.completions_schema import CompletionRequest
from jaxserve.config import Config, ModelConfig, ServerConfig
from jaxserve.errors import (
    ConfigError,
    ContextLengthError,
    InvalidRequestError,
    ModelNotFoundError,
    StartupError,
    UnavailableError,
)
from jaxserve.executor.fake.experts import fake_experts
from jaxserve.executor.fake.models import next_token
from jaxserve.frontend.sampling import sampling_params
from jaxserve.ipc.engine_spec import FakeOptions, Script
from jaxserve.llm.background import Background
from jaxserve.llm.llm import llm_config
from jaxserve.llm.progress import has_terminal
from jaxserve.sampling.params import OPTIONS, EngineSamplingParams
from jaxserve.tokenizer.tokenizer import load_tokenizer
from tests.e2e.http_server import ROOT, SOURCES, TOKENIZER, until
from tests.e2e.test_http_tools import EOS, REPLY, START, TEMPLATE, TOOLS

VOCAB = 389
GREEDY = SamplingParams(temperature=0, max_tokens=5)
USER = [{"role": "user", "content": "The weather?"}]


def fake_llm(folder: Path, *, returns_experts: bool = False, **options: Any) -> LLM:
    template = folder / "chat.jinja"
    template.write_text(TEMPLATE)
    config = Config(
        model=ModelConfig(
            model=str(TOKENIZER),
            chat_template=str(template),
            lora_modules="sql=any/sql",
            enable_return_routed_experts=returns_experts,
        ),
        server=ServerConfig(tool_call_parser="hermes", reasoning_parser="qwen3", log_level="error"),
    )
    config = dataclasses.replace(config, scheduler=llm_config("any", {"max_num_seqs": 4}).scheduler)
    fake = FakeOptions(**{"vocab_size": VOCAB, "num_blocks": 2048} | options)
    return LLM.from_config(config, executor="fake", fake=fake)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    reply = load_tokenizer(TOKENIZER).encode(f"assistant\n{REPLY}", add_special_tokens=False)
    script = Script(cue=START, token_ids=(*reply, EOS))
    with fake_llm(tmp_path_factory.mktemp("template"), script=script, max_model_len=600) as running:
        yield running


def test_an_adapter_is_chosen_by_its_name(llm: LLM) -> None:
    """The fake engine ignores adapters; the server's tests show, with the same requests, that the real one gets them."""
    [plain], [adapted] = (llm.generate("Hi", GREEDY, adapter=name, progress_bar=False) for name in (None, "sql"))
    assert adapted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert llm.chat(USER, GREEDY, adapter="sql", progress_bar=False)[0].outputs[0].token_ids
    for ask in (lambda: llm.generate("Hi", GREEDY, adapter="poems"), lambda: llm.chat(USER, GREEDY, adapter="poems")):
        with pytest.raises(ModelNotFoundError, match=r"`poems` does not exist.*sql"):
            ask()


def test_experts_of_all_tokens_come_with_a_result(tmp_path: Path, llm: LLM) -> None:
    params = dataclasses.replace(GREEDY, n=2, temperature=1.0, seed=5, return_routed_experts=True)
    prompt = list(range(3, 40))
    with fake_llm(tmp_path, returns_experts=True) as returning:
        [result] = returning.generate([prompt], params, progress_bar=False)
        [plain] = returning.generate([prompt], GREEDY, progress_bar=False)
    for output in result.outputs:
        text = [*prompt, *output.token_ids[:-1]]
        assert output.routed_experts is not None
        assert np.array_equal(output.routed_experts, [fake_experts(text[: i + 1]) for i in range(len(text))])
    assert plain.outputs[0].routed_experts is None
    with pytest.raises(InvalidRequestError, match="--enable-return-routed-experts"):
        llm.generate([prompt], params)


def continued(prompt: list[int], length: int) -> list[int]:
    past = list(prompt)
    for _ in range(length):
        past.append(next_token(past, VOCAB))
    return past[len(prompt) :]


def engines_of(pid: int) -> list[str]:
    """Ids of its children that run an engine, whichever thread started them."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += (task / "children").read_text().split()
    return [child for child in found if b"jaxserve.engine.process" in Path(f"/proc/{child}/cmdline").read_bytes()]


def children() -> list[str]:
    return engines_of(os.getpid())


SIZE: dict[str, Any] = {"type": "object", "properties": {"size": {"enum": ["small", "large"]}}, "required": ["size"]}


def test_texts_are_held_to_grammars_beside_others_that_are_not(llm: LLM) -> None:
    schema = {"json": SIZE | {"additionalProperties": False}}
    forms = [None, schema, {"regex": "[ab]{3}"}, {"choice": ["yes", "no"]}]
    params = [SamplingParams(seed=1, max_tokens=60, structured_outputs=form) for form in forms]
    free, held, short, chosen = (result.outputs[0] for result in llm.generate(["x"] * 4, params))
    assert free.text == llm.generate("x", params[0])[0].outputs[0].text
    assert json.loads(held.text)["size"] in ("small", "large")
    assert re.fullmatch("[ab]{3}", short.text)
    assert chosen.text in ("yes", "no")
    assert {held.finish_reason, short.finish_reason, chosen.finish_reason} == {"stop"}


def test_forced_calls_follow_their_schema_after_the_reasoning(llm: LLM) -> None:
    tool = {"type": "function", "function": {"name": "resize", "parameters": SIZE | {"additionalProperties": False}}}
    params = SamplingParams(seed=2, max_tokens=300)
    [reply] = llm.chat(USER, params, tools=[tool], tool_choice="required")[0].outputs
    assert reply.reasoning == "The user wants the weather."
    assert reply.tool_calls
    assert all(json.loads(call.arguments)["size"] in ("small", "large") for call in reply.tool_calls[:1])


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"regex": "("}, "structured_outputs.regex"),
        ({"regex": "a", "json_object": True}, "one kind"),
        ({"xml": 1}, "xml"),
    ],
)
def test_grammars_that_cannot_be_followed_are_refused(llm: LLM, form: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        llm.generate("x", SamplingParams(structured_outputs=form))


def test_many_more_prompts_than_rows_keep_their_order(llm: LLM) -> None:
    prompts = [[5, 6, 7 + i] for i in range(40) if START not in continued([5, 6, 7 + i], 5)]
    assert len(prompts) > 30
    results = llm.generate(prompts, GREEDY)
    assert [result.prompt_token_ids for result in results] == prompts
    assert [result.outputs[0].token_ids for result in results] == [continued(prompt, 5) for prompt in prompts]
    assert {(result.prompt, result.outputs[0].finish_reason) for result in results} == {(None, "length")}


def test_the_page_on_python_says_what_runs(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [snippet] = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "python.md").read_text("utf-8"), re.M | re.S)
    monkeypatch.setattr(jaxserve, "LLM", lambda **settings: contextlib.nullcontext(llm))
    exec(snippet, {})
    printed = capsys.readouterr().out
    assert printed.startswith("The capital of France is")
    assert printed.rstrip().endswith(("stop", "length", "tool_calls"))


def test_a_text_is_one_prompt_and_a_list_of_ids_too(llm: LLM) -> None:
    [by_text] = llm.generate("hello", GREEDY)
    [by_ids] = llm.generate(by_text.prompt_token_ids, GREEDY)
    assert by_text.prompt == "hello"
    assert by_text.prompt_token_ids == load_tokenizer(TOKENIZER).encode("hello", True)
    assert by_text.outputs == by_ids.outputs
    assert llm.generate([], GREEDY) == []


def test_prompts_may_be_spelled_as_vllm_does(llm: LLM) -> None:
    [by_text] = llm.generate("hello", GREEDY)
    for prompt in ({"prompt": "hello"}, {"prompt_token_ids": by_text.prompt_token_ids}):
        assert [result.outputs for result in llm.generate(prompt, GREEDY)] == [by_text.outputs]
        assert [result.outputs for result in llm.generate([prompt, "hello"], GREEDY)] == [by_text.outputs] * 2


@pytest.mark.parametrize(
    "prompt", [{"text": "hello"}, {"prompt": "a", "multi_modal_data": {}}, {}, {"prompt": 3}, 3.5, b"hello"]
)
def test_what_is_no_prompt_is_refused_by_name(llm: LLM, prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"'prompts\[1\]': must be a text or token ids, got "):
        llm.generate(["hello", prompt], GREEDY)


def test_each_prompt_may_have_its_own_params(llm: LLM) -> None:
    results = llm.generate(["a", "b"], [GREEDY, dataclasses.replace(GREEDY, max_tokens=2)])
    assert [len(result.outputs[0].token_ids) for result in results] == [5, 2]
    with pytest.raises(InvalidRequestError, match="each of the 2 prompts, got 3"):
        llm.generate(["a", "b"], [GREEDY] * 3)


def test_several_continuations_differ_and_repeat_by_seed(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=4)
    first, again = (llm.generate([9, 8], params)[0].outputs for _ in range(2))
    assert first == again
    assert [output.index for output in first] == [0, 1, 2]
    assert len({tuple(output.token_ids) for output in first}) == 3


def test_stop_strings_end_text_and_tokens(llm: LLM) -> None:
    [whole] = llm.generate([5, 6, 7], dataclasses.replace(GREEDY, max_tokens=12))
    text = whole.outputs[0].text
    stop = text[len(text) // 2 :][:2]
    [cut] = llm.generate([5, 6, 7], dataclasses.replace(GREEDY, max_tokens=12, stop=[stop]))
    output = cut.outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == (text[: text.index(stop)], "stop", stop)
    assert output.token_ids == whole.outputs[0].token_ids[: len(output.token_ids)]
    assert len(output.token_ids) < 12


def test_log_probabilities_are_listed_by_token(llm: LLM) -> None:
    params = dataclasses.replace(GREEDY, max_tokens=2, logprobs=2, prompt_logprobs=1)
    [result] = llm.generate([5, 6, 7], params)
    output = result.outputs[0]
    assert output.logprobs is not None
    assert result.prompt_logprobs is not None
    assert [next(iter(entry)) for entry in output.logprobs] == output.token_ids
    assert [[value.rank for value in entry.values()] for entry in output.logprobs] == [[1, 2], [1, 2]]
    assert output.cumulative_logprob == sum(
        e[t].logprob for e, t in zip(output.logprobs, output.token_ids, strict=True)
    )
    first, *others = result.prompt_logprobs
    assert first is None
    assert [entry and (next(iter(entry)), next(iter(entry.values())).logprob) for entry in others] == [(6, -6), (7, -7)]
    assert llm.generate([5], GREEDY)[0].outputs[0].logprobs is None


def test_chat_reads_calls_and_reasoning(llm: LLM) -> None:
    results = llm.chat([USER, USER], SamplingParams(temperature=0, max_tokens=None), tools=TOOLS)
    assert len(results) == 2
    for result in results:
        output = result.outputs[0]
        assert result.prompt is not None
        assert result.prompt.endswith("The weather?<|im_end|><|im_start|>assistant\n")
        assert (output.text, output.reasoning) == ("One moment.", "The user wants the weather.")
        assert [call.name for call in output.tool_calls] == ["get_weather", "now"]
        assert msgspec.json.decode(output.tool_calls[0].arguments) == {"city": "Paris", "note": 'café "x"'}
        assert (output.finish_reason, output.token_ids[-1]) == ("tool_calls", EOS)
    [alone] = llm.chat(USER, GREEDY)
    assert "get_weather" not in (alone.prompt or "")


@pytest.mark.parametrize(
    ("bad", "params", "message"),
    [
        ([VOCAB], GREEDY, "'prompt': token id 389 is outside the vocabulary"),
        ([], GREEDY, "'prompt': must not be empty"),
        ([3] * 600, GREEDY, "maximum context length is 600"),
        ([3], SamplingParams(temperature=3.5), "'temperature'.*3.5"),
        ([3], SamplingParams(n=0), "'n': must be 1 to 128 .--max-choices., got 0"),
        ([3], SamplingParams(top_k="x"), "'top_k'.*int"),  # type: ignore[arg-type]
        ([3], SamplingParams(logprobs=21), "'logprobs': must be 0 to 20 .--max-top-logprobs., got 21"),
    ],
)
def test_one_bad_prompt_is_refused_before_anything_runs(
    llm: LLM, bad: list[int], params: SamplingParams, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object) -> None:
        raise AssertionError("something runs")

    monkeypatch.setattr("jaxserve.llm.llm.run_all", never)
    with pytest.raises(InvalidRequestError, match=message) as caught:
        llm.generate([[1, 2], bad], [GREEDY, params])
    assert caught.value.__notes__ == ["in prompt 1 of 2, counted from 0"]


@pytest.mark.parametrize("params", [{"temperature": 0}, [{"temperature": 0}], "greedy", 0])
def test_what_are_no_sampling_params_is_refused_by_name(llm: LLM, params: Any) -> None:
    with pytest.raises(InvalidRequestError, match="'sampling_params': must be SamplingParams or a list of them, got "):
        llm.generate("x", params)


def test_weights_are_updated_and_tokens_name_their_version(llm: LLM, tmp_path: Path) -> None:
    version = llm.update_weights("other")
    with pytest.raises(InvalidRequestError, match="no such folder"):
        llm.update_weights(tmp_path / "none")
    assert llm.update_weights(arrays={"a": np.zeros((2, 3), np.float32)}) == version + 1
    version += 1
    for arrays in ({}, {"a": 3}, {"a": np.zeros(3, np.float64)}):
        with pytest.raises(InvalidRequestError, match="'arrays': "):
            llm.update_weights(arrays=arrays)  # type: ignore[arg-type]
    for given in ({}, {"model": "other", "arrays": {"a": np.zeros(3)}}):
        with pytest.raises(InvalidRequestError, match="or `arrays` instead"):
            llm.update_weights(**given)  # type: ignore[arg-type]
    llm.sleep(level=2)
    with pytest.raises(UnavailableError, match="sleeping"):
        llm.generate([5, 6, 7])
    llm.wake_up()
    [[output]] = [result.outputs for result in llm.generate([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True))]
    assert output.weight_versions == [version] * 3


def test_given_tokens_are_replayed(llm: LLM) -> None:
    """The fake model's log-probability of a token is its negative id."""
    assert llm.replay([[5, 6], [9]], [[7, 8, 3], []], progress_bar=False) == [[-7.0, -8.0, -3.0], []]
    for prompts, completions in (([[5]], []), ([[]], [[5]])):
        with pytest.raises(InvalidRequestError, match="as many entries"):
            llm.replay(prompts, completions)


def test_every_prompt_of_a_generator_is_computed(llm: LLM) -> None:
    prompts = [[5, 6], [7], [8, 9]]
    results = llm.generate((prompt for prompt in prompts), SamplingParams(max_tokens=1))
    assert [result.prompt_token_ids for result in results] == prompts
    for wrong in (np.array([5.0, 6.0]), 5):
        with pytest.raises(InvalidRequestError, match="token ids, got"):
            llm.generate(wrong)  # type: ignore[arg-type]


def test_token_ids_may_be_those_of_numpy(llm: LLM) -> None:
    given: list[Any] = [np.array([5, 6]), [np.array([5, 6]), np.array([7])], {"prompt_token_ids": np.array([5, 6])}]
    results = [llm.generate(prompts, SamplingParams(max_tokens=1)) for prompts in given]
    assert [[each.prompt_token_ids for each in result] for result in results] == [[[5, 6]], [[5, 6], [7]], [[5, 6]]]


def test_bytes_are_no_token_ids(llm: LLM) -> None:
    for prompt in (b"hi", bytearray(b"hi")):
        with pytest.raises(InvalidRequestError, match="'prompts': must be a text or token ids, got "):
            llm.generate(prompt)


@pytest.mark.parametrize("messages", ["hi", USER[0], None])
def test_what_is_no_conversation_is_refused_by_name(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match="must be a list of messages with a role and a content, got "):
        llm.chat(messages)


def test_conversations_may_come_from_a_generator(llm: LLM) -> None:
    for messages in ((message for message in USER), (messages for messages in [USER])):
        assert len(llm.chat(messages, GREEDY)) == 1  # type: ignore[arg-type]


def test_a_lone_surrogate_is_refused_before_the_engine_gets_it(llm: LLM) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "\ud800"}}
    for name, ask in (
        ("structured_outputs", lambda: llm.generate("x", SamplingParams(structured_outputs={"choice": ["\ud800"]}))),
        ("tools", lambda: llm.chat(USER, tools=[tool])),
        ("model", lambda: llm.update_weights("\ud800")),
    ):
        with pytest.raises(InvalidRequestError, match=f"'{name}': is not valid Unicode: a lone surrogate"):
            ask()


@pytest.mark.parametrize("level", [0, 3, "1", None])
def test_a_wrong_command_is_refused_before_the_engine_gets_it(llm: LLM, level: Any) -> None:
    """The engine ignores a message that it cannot read: its answer would never come."""
    with pytest.raises(InvalidRequestError, match="'level': must be 1 or 2, got "):
        llm.sleep(level)
    with pytest.raises(InvalidRequestError, match="'mode': must be one of keep, wait, abort, got "):
        llm.update_weights("other", mode=level)


def test_a_prompt_too_large_for_the_cache_is_refused_by_us(tmp_path: Path) -> None:
    with fake_llm(tmp_path, num_blocks=3) as llm:
        assert len(llm.generate([3] * 20, SamplingParams(max_tokens=13))[0].outputs[0].token_ids) == 13
        with pytest.raises(ContextLengthError, match="KV cache for 33 tokens, this server holds 32"):
            llm.generate([[1], [3] * 20], SamplingParams(max_tokens=14))


def test_public_options_are_those_of_the_engine_with_its_defaults() -> None:
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert OPTIONS.keys() | {"max_tokens"} <= names
    assert names <= {field.name for field in msgspec.structs.fields(CompletionRequest)}
    request = msgspec.convert(SamplingParams().request_fields() | {"prompt": "x"}, CompletionRequest)
    made = sampling_params(request, {}, max_tokens=16, seed=0, num_top_logprobs=None, vocab_size=VOCAB)
    assert made == EngineSamplingParams(seed=0, stop_token_ids=[])


def test_limits_on_requests_that_errors_name_are_settings(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"--max-choices"):
        llm.generate("x", SamplingParams(n=300))
    config = llm_config("some/model", {"max_choices": 300, "max_grammar_size": "1MiB"})
    assert (config.limits.max_choices, config.structured.max_grammar_size) == (300, 1 << 20)


def test_settings_are_checked_by_name_and_value() -> None:
    config = llm_config("some/model", {"kv_cache_memory": "1GiB", "max_num_seqs": 3, "overlap": False})
    assert (config.model.model, config.cache.kv_cache_memory) == ("some/model", 1 << 30)
    assert (config.scheduler.max_num_seqs, config.scheduler.overlap) == (3, False)
    with pytest.raises(ConfigError, match=r"max_num_seq=.*did you mean `max_num_seqs`"):
        LLM("some/model", max_num_seq=3)
    for server_setting in ({"port": 8000}, {"replicas": 2}, {"routing": "prefix"}, {"max_prompts": 9}):
        with pytest.raises(ConfigError, match=rf"{next(iter(server_setting))}=.*not a setting of an engine"):
            LLM("some/model", **server_setting)
    with pytest.raises(ConfigError, match="--max-num-seqs 0: expected an integer, at least 1"):
        LLM("some/model", max_num_seqs=0)


def test_ends_leave_no_process_and_refuse_further_work(tmp_path: Path) -> None:
    before = children()
    with fake_llm(tmp_path) as llm:
        assert len(children()) == len(before) + 1
    llm.close()
    assert children() == before
    with pytest.raises(UnavailableError, match="closed"):
        llm.generate("a")
    with pytest.raises(StartupError, match="no such weights"):
        fake_llm(tmp_path, start_error="no such weights")
    assert children() == before


def test_a_dead_engine_ends_the_work_with_an_error(tmp_path: Path) -> None:
    before = set(children())
    with fake_llm(tmp_path, device_seconds=0.01) as llm:
        [engine] = set(children()) - before
        timer = threading.Timer(0.1, os.kill, (int(engine), signal.SIGKILL))
        timer.start()
        with pytest.raises(UnavailableError, match="engine"):
            llm.generate([[5], [6]], SamplingParams(max_tokens=2000, ignore_eos=True))
        timer.join()


def test_closing_ends_what_another_thread_waits_for(tmp_path: Path) -> None:
    llm = fake_llm(tmp_path, device_seconds=0.01)
    timer = threading.Timer(0.1, llm.close)
    timer.start()
    with pytest.raises(UnavailableError):
        llm.generate([5], SamplingParams(max_tokens=2000, ignore_eos=True))
    timer.join()


INTERRUPTED = """
import sys, threading
from jaxserve import LLM, SamplingParams
from jaxserve.config import Config, ModelConfig, SchedulerConfig
from jaxserve.ipc.engine_spec import FakeOptions
config = Config(model=ModelConfig(model=sys.argv[1]), scheduler=SchedulerConfig(max_num_seqs=1))
async def get_client(state):
    return state.client
llm = LLM.from_config(config, executor="fake", fake=FakeOptions(vocab_size=389, num_blocks=2048, device_seconds=0.1))
client = llm._engine.call(get_client)
def tell():
    while not any(connection._streams for connection in client.engines.connections.values()):
        threading.Event().wait(0.01)
    print("running", flush=True)
threading.Thread(target=tell).start()
try:
    llm.generate([5], SamplingParams(max_tokens=2000, ignore_eos=True))
except KeyboardInterrupt:
    print(llm.generate([5, 6], SamplingParams(temperature=0, max_tokens=5))[0].outputs[0].token_ids)
    assert "jax" not in sys.modules
"""


def test_ctrl_c_ends_the_work_and_the_program_its_engine() -> None:
    """Without `close`: the end of the program is enough."""
    command = [sys.executable, "-W", "error", "-c", INTERRUPTED, str(TOKENIZER)]
    environment = os.environ | {"PYTHONPATH": SOURCES}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, start_new_session=True, text=True
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "running\n"
        [engine] = engines_of(program.pid)
        os.killpg(program.pid, signal.SIGINT)
        output, errors = program.communicate(timeout=100)  # the 2000 tokens would take 200 s
    assert (program.returncode, output) == (0, f"{continued([5, 6], 5)}\n"), errors
    assert errors == ""
    until(lambda: not Path(f"/proc/{engine}").exists(), "the engine lives on")


def test_an_interrupted_start_leaves_its_context() -> None:
    left = threading.Event()

    @contextlib.asynccontextmanager
    async def never_there() -> Any:
        try:
            raise_soon.start()
            await asyncio.Event().wait()
            yield
        finally:
            left.set()

    main = threading.main_thread().ident
    assert main is not None
    raise_soon = threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        Background(never_there()).start()
    assert left.is_set()


def test_a_start_without_descriptors_for_an_event_loop_ends_with_their_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_loop(work: Coroutine[Any, Any, None]) -> None:
        work.close()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("jaxserve.llm.background.asyncio.run", no_loop)
    with pytest.raises(OSError, match="Too many open files"):
        Background(contextlib.nullcontext(1)).start()


def test_a_program_with_a_closed_stderr_has_no_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert not has_terminal()


def test_an_engine_that_is_collected_in_its_own_thread_ends() -> None:
    ends = list[str]()

    @contextlib.asynccontextmanager
    async def entered() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            ends.append("left")

    async def collect(number: int) -> None:
        background.stop()
        await asyncio.Event().wait()

    background = Background(entered())
    background.start()
    with pytest.raises(UnavailableError, match="was closed while it worked"):
        background.call(collect)
    background._thread.join()
    assert ends == ["left"]


FORKED = """
import contextlib, os, signal
from jaxserve.errors import UnavailableError
from jaxserve.llm.background import Background

@contextlib.asynccontextmanager
async def entered():
    yield 1

async def work(number):
    return number

background = Background(entered())
background.start()
assert background.call(work) == 1
child = os.fork()
if child == 0:
    signal.alarm(20)
    try:
        background.call(work)
    except UnavailableError:
        os._exit(0)
    os._exit(1)
assert os.waitpid(child, 0)[1] == 0
background.stop()
"""


def test_a_forked_process_cannot_use_the_llm_of_its_parent() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], env={"PYTHONPATH": SOURCES}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_nothing_else() -> None:
    script = "import sys, jaxserve; assert 'LLM' in jaxserve.__all__; sys.exit(', '.join({'msgspec', 'numpy', 'aiohttp'} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", script], env={"PYTHONPATH": SOURCES}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not hasattr(jaxserve, "LMM")


def test_the_public_names_are_completed() -> None:
    assert set(jaxserve.__all__) <= set(dir(jaxserve))
