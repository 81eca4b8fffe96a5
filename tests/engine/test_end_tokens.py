"""The tokens that end a reply: those of the model's configs and those of its tokenizer."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from jaxserve.config import Config, ModelConfig, RecorderConfig
from jaxserve.engine.process import build_core
from jaxserve.executor.fake.executor import FakeExecutor
from jaxserve.flight.record import read_record
from jaxserve.ipc.engine_spec import EngineSpec, FakeOptions, Script
from jaxserve.ipc.messages import RequestOutput
from jaxserve.tokenizer.tokenizer import load_tokenizer
from tests.engine.rig import add
from tests.unit.checkpoint.checkpoint_files import write_gguf

ROOT = Path(__file__).parents[1]
CONFIG = Config(model=ModelConfig(model="m"))
END, CONFIG_END = 2, 0


def of_model(
    path: Path, kind: Literal["local", "fake"] = "local", **options: Any
) -> tuple[EngineSpec, FakeExecutor[Any, Any]]:
    """Return the specification of an engine for the model, and an executor whose end tokens are those of the model's configs."""
    fake = FakeOptions(eos_token_ids=(CONFIG_END,), **options)
    return EngineSpec(config=CONFIG, model_path=str(path), address="", executor=kind), FakeExecutor.start(CONFIG, fake)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A chat model whose tokenizer has the EOS <|im_end|>, while its config still has that of the base model."""
    path = Path(shutil.copytree(ROOT / "fixtures" / "tokenizers" / "byte_level", tmp_path / "model"))
    (path / "config.json").write_text(json.dumps({"eos_token_id": CONFIG_END}), encoding="utf-8")
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A GGUF file that declares one EOS, and has the control tokens <|endoftext|> and <|im_end|>."""
    vocabularies = json.loads((ROOT / "unit" / "tokenizer" / "data" / "vocabs.json").read_text(encoding="utf-8"))
    return write_gguf(tmp_path / "m.gguf", "llama", vocabularies["byte_level"] | {"tokenizer.ggml.eos_token_id": 1}, {})


def ends_of(spec: EngineSpec, executor: FakeExecutor[Any, Any]) -> frozenset[int]:
    core: Any = build_core(spec, executor)
    ends: frozenset[int] = core._scheduler._eos_token_ids
    return ends


def test_replies_end_at_the_end_tokens_of_the_tokenizer_too(folder: Path, file: Path) -> None:
    for path, expected in ((folder, {0, 2}), (file, {0, 1, 2})):
        assert ends_of(*of_model(path)) == {CONFIG_END, *load_tokenizer(path).eos_token_ids} == expected


def test_end_tokens_that_the_model_has_not_are_left_out(folder: Path) -> None:
    assert ends_of(*of_model(folder, vocab_size=2)) == {CONFIG_END}


def test_a_model_without_a_tokenizer_ends_replies_as_its_configs_say(tmp_path: Path) -> None:
    assert ends_of(*of_model(tmp_path)) == {CONFIG_END}
    assert ends_of(*of_model(Path("/nowhere"), "fake")) == {CONFIG_END}


@pytest.mark.parametrize("max_decode_steps", [1, 8])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"ignore_eos": False}, ([11, END], "stop", None)),
        ({"ignore_eos": True}, ([11, END, 12, CONFIG_END, 13], "length", None)),
        ({"ignore_eos": True, "stop_token_ids": (END,)}, ([11, END], "stop", END)),
    ],
)
def test_a_request_ends_at_the_end_token_of_the_tokenizer(
    folder: Path, options: dict[str, Any], expected: tuple[list[int], str, int | None], max_decode_steps: int
) -> None:
    script = Script(cue=9, token_ids=(11, END, 12, CONFIG_END, 13))
    spec, executor = of_model(folder, script=script, max_decode_steps=max_decode_steps)
    core = build_core(spec, executor)
    outputs: list[RequestOutput] = list(core.handle(add("r", [5, 9], max_tokens=5, **options)))
    while not outputs or outputs[-1].finish_reason is None:
        step = core.step()
        outputs += [] if step is None else step.outputs
    tokens = [token for output in outputs for token in output.token_ids]
    assert (tokens, outputs[-1].finish_reason, outputs[-1].stop_token_id) == expected


def test_a_flight_record_has_the_end_tokens_of_the_tokenizer(folder: Path, tmp_path: Path) -> None:
    spec, executor = of_model(folder)
    recorder = RecorderConfig(flight_recorder_dir=str(tmp_path / "flight"))
    core = build_core(msgspec.structs.replace(spec, config=dataclasses.replace(CONFIG, recorder=recorder)), executor)
    assert core.flight is not None
    assert read_record(core.flight.write("test")).shape.eos_token_ids == [CONFIG_END, END]
