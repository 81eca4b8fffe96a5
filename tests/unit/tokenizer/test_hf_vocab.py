"""Tokenizers of Hugging Face directories: precedence of files, and rejected directories."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import processors

from jaxserve.checkpoint.files import expect_tokenizer_files, read_config
from jaxserve.errors import CheckpointError
from jaxserve.tokenizer import hf_vocab
from jaxserve.tokenizer.tokenizer import load_eos_token_ids, load_tokenizer

FIXTURES = Path(__file__).parents[2] / "fixtures" / "tokenizers"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / "byte_level", tmp_path / "model"))


def write(path: Path, value: Any) -> None:
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


def change_config(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8")) | changes
    write(directory / "tokenizer_config.json", {key: value for key, value in config.items() if value is not None})


def test_eos_ids_are_the_tokenizers_then_those_of_both_configs(directory: Path) -> None:
    assert load_tokenizer(directory).eos_token_ids == (2,)
    write(directory / "config.json", {"eos_token_id": 7})
    assert load_tokenizer(directory).eos_token_ids == (2, 7)
    write(directory / "generation_config.json", {"eos_token_id": [0, 2]})
    assert load_tokenizer(directory).eos_token_ids == (2, 0, 7)


@pytest.mark.parametrize("eos", ["<|im_end|>", {"content": "<|endoftext|>"}, "!", "no such token", None])
def test_eos_ids_are_the_same_without_the_vocabulary(directory: Path, eos: Any) -> None:
    change_config(directory, eos_token=eos)
    write(directory / "config.json", {"eos_token_id": [0, 5]})
    assert load_eos_token_ids(directory) == load_tokenizer(directory).eos_token_ids


def test_eos_ids_of_a_folder_that_would_have_to_be_converted(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "tokenizer.json").unlink()
    change_config(directory, added_tokens_decoder={"32000": {"content": "<|im_end|>", "special": True}})
    monkeypatch.setattr(hf_vocab, "_converted_backend", None)
    assert load_eos_token_ids(directory) == (32000,)


def test_eos_ids_of_a_folder_without_a_tokenizer_are_those_of_its_configs(tmp_path: Path) -> None:
    assert load_eos_token_ids(tmp_path) == ()
    write(tmp_path / "generation_config.json", {"eos_token_id": 9})
    assert load_eos_token_ids(tmp_path) == (9,)


def test_eos_ids_of_a_damaged_tokenizer_are_no_ids(directory: Path) -> None:
    write(directory / "tokenizer.json", "{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a usable tokenizer"):
        load_eos_token_ids(directory)


def test_special_tokens_are_strings_or_objects_in_either_file(directory: Path) -> None:
    change_config(directory, bos_token={"content": "<|endoftext|>"}, eos_token=None)
    write(directory / "special_tokens_map.json", {"eos_token": {"content": "<|im_start|>"}, "bos_token": "ignored"})
    write(directory / "chat_template.jinja", "{{ bos_token }} {{ eos_token }}")
    loaded = load_tokenizer(directory)
    assert (loaded.bos_token_id, loaded.eos_token_id) == (0, 1)
    assert loaded.chat_templates.render(USER) == "<|endoftext|> <|im_start|>"


@pytest.mark.parametrize(
    ("changes", "single", "pair"),
    [
        ({"add_eos_token": True}, "[a]", "[a][b]"),
        ({"add_bos_token": True, "add_eos_token": False}, "[a", "[a[b"),
        ({"add_bos_token": False, "add_eos_token": None}, "a", "ab"),
        ({"add_bos_token": True, "eos_token": None}, "[a", "[a[b"),
        ({"add_bos_token": None}, "a", "ab"),
        ({"add_bos_token": True, "tokenizer_class": "PreTrainedTokenizerFast"}, "a", "ab"),
    ],
)
def test_texts_begin_and_end_as_a_llama_tokenizer_says(
    directory: Path, changes: dict[str, Any], single: str, pair: str
) -> None:
    """Test a tokenizer.json that adds nothing. [ is BOS, ] is EOS."""
    change_config(directory, tokenizer_class="LlamaTokenizerFast")
    change_config(directory, **changes)
    loaded = load_tokenizer(directory)
    letters = {"[": 1, "]": 2} | {letter: loaded.encode(letter, add_special_tokens=False)[0] for letter in "ab"}
    assert loaded.encode("a") == [letters[sign] for sign in single]
    assert loaded.encode("a", add_special_tokens=False) == [letters["a"]]
    [(ids, _)] = loaded.encode_pairs([("a", "b")], None)
    assert ids == [letters[sign] for sign in pair]


def test_texts_keep_the_ends_of_tokenizer_json_if_the_config_asks_for_a_token_that_it_does_not_name(
    directory: Path,
) -> None:
    """[ is BOS. transformers before version 5 knew the names of Llama's tokens, or refused such a config."""
    path = directory / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.post_processor = processors.TemplateProcessing(single="[ $A", pair="[ $A $B", special_tokens=[("[", 1)])
    backend.save(str(path))
    change_config(directory, tokenizer_class="LlamaTokenizer", add_bos_token=True, bos_token=None)
    loaded = load_tokenizer(directory)
    assert loaded.encode("a") == [1, *loaded.encode("a", add_special_tokens=False)]


def test_a_flag_of_a_llama_tokenizer_is_true_or_false(directory: Path) -> None:
    change_config(directory, tokenizer_class="LlamaTokenizer", add_eos_token="yes")
    with pytest.raises(CheckpointError, match="add_eos_token: expected true or false, found 'yes'"):
        load_tokenizer(directory)


def test_chat_templates_come_from_the_first_of_option_file_and_config(directory: Path, tmp_path: Path) -> None:
    assert load_tokenizer(directory).chat_templates.render(USER).startswith("<|im_start|>user")
    change_config(
        directory, chat_template=[{"name": "default", "template": "named"}, {"name": "tool_use", "template": "t"}]
    )
    assert load_tokenizer(directory).chat_templates.render(USER) == "named"
    assert load_tokenizer(directory).chat_templates.render(USER, tools=[{}]) == "t"
    write(directory / "chat_template.json", {"chat_template": "of the processor"})
    assert load_tokenizer(directory).chat_templates.render(USER) == "of the processor"
    assert load_tokenizer(directory).chat_templates.render(USER, tools=[{}]) == "t"
    write(directory / "chat_template.jinja", "file")
    assert load_tokenizer(directory).chat_templates.render(USER) == "file"
    write(tmp_path / "own.jinja", "option")
    loaded = load_tokenizer(directory, chat_template=tmp_path / "own.jinja")
    assert loaded.chat_templates.render(USER) == loaded.chat_templates.render(USER, tools=[{}]) == "option"


@pytest.mark.parametrize("name", ["chat_template.json", "processor_config.json"])
def test_a_processor_may_have_the_only_chat_template(directory: Path, name: str) -> None:
    change_config(directory, chat_template=None)
    write(directory / name, {"chat_template": "of the processor"})
    assert load_tokenizer(directory).chat_templates.render(USER) == "of the processor"


def test_additional_templates_are_found_by_file_name(directory: Path) -> None:
    (directory / "additional_chat_templates").mkdir()
    write(directory / "additional_chat_templates" / "tool_use.jinja", "for tools")
    assert load_tokenizer(directory).chat_templates.render(USER, tools=[{"name": "f"}]) == "for tools"


def test_code_of_the_checkpoint_is_never_run(directory: Path, tmp_path: Path) -> None:
    change_config(directory, auto_map={"AutoTokenizer": ["evil.Evil", None]}, tokenizer_class="Evil")
    write(directory / "evil.py", f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    load_tokenizer(directory)
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_that_only_code_of_the_checkpoint_reads_is_named(directory: Path) -> None:
    (directory / "tokenizer.json").rename(directory / "tiktoken.model")
    change_config(directory, auto_map={"AutoTokenizer": ["tokenization_other.TikTokenTokenizer", None]})
    with pytest.raises(
        CheckpointError, match=r"no tokenizer\.json, and its tokenizer is code .*put a tokenizer\.json"
    ) as caught:
        load_tokenizer(directory)
    assert "\n" not in str(caught.value)
    for name in ("tokenizer.model", "spiece.model", "vocab.json"):
        (directory / name).touch()
        expect_tokenizer_files(directory, "model")
        (directory / name).unlink()


def test_code_that_reads_a_vocabulary_is_named_and_not_asked_for(directory: Path) -> None:
    """InternLM2 and Baichuan are published so: transformers converts their files with the code of the repository only."""
    (directory / "tokenizer.json").rename(directory / "tokenizer.model")
    change_config(
        directory,
        auto_map={"AutoTokenizer": ["tokenization_internlm2.InternLM2Tokenizer", None]},
        tokenizer_class="InternLM2Tokenizer",
    )
    with pytest.raises(CheckpointError, match=r"its tokenizer is code .*, which is not run; put a tokenizer\.json"):
        load_tokenizer(directory)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json: not a usable tokenizer"),
        ("tokenizer.json", '{"model": {"type": "Magic"}}', r"tokenizer\.json: not a usable tokenizer"),
        ("tokenizer_config.json", "[1]", r"tokenizer_config\.json: expected a JSON object, found list"),
        ("tokenizer_config.json", "\x00", r"tokenizer_config\.json: expected JSON, found"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template: expected text or a list, found int"),
        ("tokenizer_config.json", '{"chat_template": [3]}', "chat_template: expected a list of .* objects, found 3"),
        ("chat_template.json", '{"chat_template": 3}', r"chat_template\.json: chat_template: expected text or a list"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id: expected token ids, found 'x'"),
        ("chat_template.jinja", "{% if %}", "chat template, line 1: "),
    ],
)
def test_a_damaged_file_is_rejected_in_one_line(directory: Path, name: str, content: str, message: str) -> None:
    write(directory / name, content)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_tokenizer(directory)
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_no_model_is_named_with_the_gguf_file_that_it_has(tmp_path: Path) -> None:
    for read in (load_tokenizer, read_config):
        with pytest.raises(CheckpointError, match=rf"^{tmp_path}: no config.json: the folder of a model has one"):
            read(tmp_path)
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}: no config.json: give {tmp_path / 'a.gguf'}$"):
        load_tokenizer(tmp_path)


def test_a_conversion_does_not_say_that_pytorch_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    code = f"from pathlib import Path; from jaxserve.tokenizer.hf_vocab import read_hf_tokenizer as r; r(Path({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith("jaxserve.errors.CheckpointError: ")
    assert "PyTorch" not in done.stderr


def test_a_missing_path_and_a_missing_template_are_named(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: expected a Hugging Face directory or a GGUF file"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"own\.jinja: chat template cannot be read"):
        load_tokenizer(directory, chat_template=tmp_path / "own.jinja")
    write(tmp_path / "own.jinja", "{% for %}")
    with pytest.raises(CheckpointError, match=r"own\.jinja: chat template, line 1"):
        load_tokenizer(directory, chat_template=tmp_path / "own.jinja")
