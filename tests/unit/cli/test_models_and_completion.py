"""`jaxserve models` lists what is on this machine; `jaxserve completion` completes what there is."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.cli.completion import SHELLS
from jaxserve.cli.main import COMMANDS, main
from tests.models.goldens import golden_checkpoint
from tests.unit.checkpoint.checkpoint_files import minilm_directory, write_decoder

COMPLETE = """
source {script}
COMP_WORDS=(jaxserve {words}) COMP_CWORD={place}
$(complete -p jaxserve | sed -E 's/.*-F ([^ ]+).*/\\1/')
echo "${{COMPREPLY[@]}}"
"""


def listed(text: str) -> dict[str, str]:
    """Return the lines below the headline by the first word."""
    return {line.split()[0]: line for line in text.splitlines()[1:]}


def test_a_user_without_a_home_directory_has_no_hub_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxserve.tools.models import local_models

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "~nosuchuser/hub")
    assert [model.name for model in local_models([])] in (["default"], [])


def test_a_hub_cache_that_cannot_be_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hub").touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert main(["models"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be read" in line and "HF_HOME" in line


def test_a_folder_of_another_user_is_listed_with_the_reason_and_those_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jaxserve.tools import models

    read = models.models_in

    def models_in(folder: Path, *arguments: str, **options: str) -> Iterator[models.LocalModel]:
        if folder.name == "private":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return read(folder, *arguments, **options)

    (tmp_path / "private").mkdir()
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "model.gguf").touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "none"))
    monkeypatch.setattr(models, "models_in", models_in)
    found = [(model.path.name, model.problem) for model in models.local_models([tmp_path])]
    assert found[-2:] == [("private", "cannot be read: Permission denied"), ("model.gguf", None)]


@pytest.mark.slow
def test_models_of_the_hub_cache_and_of_folders_are_listed_with_a_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cached = tmp_path / "hub" / "models--owner--tiny"
    shutil.copytree(golden_checkpoint("llama2_tiny").path, cached / "snapshots" / "0123abcd")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123abcd")
    unknown = tmp_path / "models" / "unknown"
    shutil.copytree(golden_checkpoint("llama2_tiny").path, unknown)
    config = unknown / "config.json"
    config.write_text(
        config.read_text().replace("LlamaForCausalLM", "NobodyForCausalLM").replace('"llama"', '"nobody"')
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert main(["models", str(tmp_path / "models")]) == 0
    lines = listed(capsys.readouterr().out)
    assert lines["owner/tiny"].endswith("fits")
    assert "nobody" in lines[str(unknown)].lower() and "fits" not in lines[str(unknown)]
    assert lines["default"].split()[1:3] == ["135", "M"]


@pytest.mark.slow
def test_an_encoder_is_listed_as_a_model_that_embeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert main(["models", str(minilm_directory())]) == 0
    line = listed(capsys.readouterr().out)[str(minilm_directory())]
    assert line.split()[1:3] == ["23", "M"]
    assert line.endswith("fits, embeds texts")


@pytest.mark.slow
def test_a_split_gguf_model_is_one_model_with_the_plan_of_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cached = tmp_path / "hub" / "models--owner--tiny"
    snapshot, models = cached / "snapshots" / "0123abcd", tmp_path / "models"
    for folder in (snapshot / "Q4", cached / "refs", models):
        folder.mkdir(parents=True)
    (cached / "refs" / "main").write_text("0123abcd")
    write_decoder(snapshot / "Q4" / "a.gguf", "llama", num_files=3)
    for num_files in (1, 2):
        write_decoder(models / "b.gguf", "llama", num_files=num_files)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert main(["models", str(models)]) == 0
    lines = listed(capsys.readouterr().out)
    lines.pop("default", None)
    names = {"owner/tiny:Q4/a-00001-of-00003.gguf", f"{models}/b.gguf", f"{models}/b-00001-of-00002.gguf"}
    assert lines.keys() == names
    assert len({tuple(line.split()[1:]) for line in lines.values()}) == 1
    assert all(line.endswith("fits") for line in lines.values())


def test_a_folder_that_is_not_there_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "./nowhere"]) == 2
    assert "no such folder" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_commands_and_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "jaxserve"
    script.write_text(capsys.readouterr().out)

    def completed(words: str) -> set[str]:
        text = COMPLETE.format(script=script, words=words, place=len(words.split()))
        done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True)
        return set(done.stdout.split())

    assert completed("serve --max-num") == {"--max-num-seqs", "--max-num-batched-tokens"}
    assert completed("ver") == {"version"}
    assert {command.name for command in COMMANDS} <= completed('""')


SYNTAX = {"bash": ["bash", "-n"], "zsh": ["zsh", "-n"], "tcsh": ["tcsh", "-n"]}


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_each_shell_knows_every_command_and_its_flags(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for command in COMMANDS:
        assert re.search(rf"\b{command.name}\b", script), command.name
    for flag in ("--max-num-seqs", "--api-key-file", "--show", "--device"):
        assert flag.removeprefix("--") in script, flag


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_each_shell_is_valid(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    assert main(["completion", shell]) == 0
    script = tmp_path / "jaxserve"
    script.write_text(capsys.readouterr().out)
    done = subprocess.run([*SYNTAX[shell], str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
