"""Models are found at local paths or downloaded from the hub, and failures are one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils import filter_repo_objects
from huggingface_hub.utils.tqdm import are_progress_bars_disabled

from jaxserve.checkpoint.source import resolve, resolve_adapter
from jaxserve.errors import CheckpointError, ConfigError, StartupError

URL = "https://huggingface.co/api/models/owner/name/revision/main"


class FakeHub:
    """Stands in for snapshot_download: records what it is asked and answers from a directory, or raises."""

    def __init__(self, snapshot: Path) -> None:
        self.snapshot = snapshot
        self.error: Exception | None = None
        self.calls: list[dict[str, Any]] = []

    def __call__(self, repository: str, **options: Any) -> str:
        self.calls.append({"repository": repository, "bars": not are_progress_bars_disabled(), **options})
        if self.error is not None:
            raise self.error
        return str(self.snapshot)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    fake = FakeHub(snapshot)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return fake


def rejection(model: str, kind: type[StartupError] = CheckpointError, revision: str | None = None) -> str:
    with pytest.raises(kind) as caught:
        resolve(model, revision)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def http_error(kind: Callable[..., Exception], status: int, message: str = "Nope\nRequest ID: 1") -> Exception:
    return kind(message, response=httpx2.Response(status, request=httpx2.Request("GET", URL)))


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def test_existing_paths_are_returned_without_the_hub(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = Path("owner/name")
    directory.mkdir(parents=True)
    (directory / "a.gguf").write_bytes(b"GGUF")
    assert resolve("owner/name") == directory
    assert resolve("owner/name/a.gguf") == directory / "a.gguf"
    monkeypatch.setenv("HOME", str(Path.cwd()))
    assert resolve("~/owner/name") == Path.cwd() / directory
    assert hub.calls == []


def test_hub_id_fetches_safetensors_and_text_only(hub: FakeHub) -> None:
    (hub.snapshot / "model.safetensors").touch()
    assert resolve("owner/name", "v1.0") == hub.snapshot
    texts = [
        "*.json",
        "tokenizer*",
        "vocab.txt",
        "merges.txt",
        "tiktoken.model",
        "*.jinja",
        "0_*/tokenizer*",
        "0_*/vocab.txt",
    ]
    assert hub.calls == [
        {
            "repository": "owner/name",
            "bars": True,
            "revision": "v1.0",
            "allow_patterns": patterns,
            "ignore_patterns": ["[!0-9a]*/*", "[0-9][!_]*/*", "a[!d]*/*", "ad[!d]*/*"],
        }
        for patterns in (texts, ["model*.safetensors", "[0-9]_*/model*.safetensors", *texts])
    ]


def test_a_model_in_a_folder_of_sentence_transformers_is_that_folder(tmp_path: Path) -> None:
    inner = tmp_path / "0_Transformer"
    modules = [{"type": "sentence_transformers.models.Transformer", "path": "0_Transformer"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    inner.mkdir()
    (inner / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == inner
    assert resolve(str(inner)) == inner
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == tmp_path


def test_weights_are_not_fetched_if_only_code_of_the_repository_reads_its_tokenizer(hub: FakeHub) -> None:
    (hub.snapshot / "model.safetensors").touch()
    (hub.snapshot / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": ["tokenization_kimi.T", null]}}'
    )
    assert rejection("owner/name").startswith("model owner/name: no tokenizer.json, and its tokenizer is code")
    assert not any("model*.safetensors" in call["allow_patterns"] for call in hub.calls)
    assert resolve("owner/name", needs_tokenizer=False) == resolve("owner/name", weights=False) == hub.snapshot
    (hub.snapshot / "tokenizer.json").touch()
    assert resolve("owner/name") == hub.snapshot


def test_without_weights_only_the_config_of_a_hub_id_is_fetched(hub: FakeHub) -> None:
    assert resolve("owner/name", weights=False) == hub.snapshot
    described = ["config.json", "hf_quant_config.json", "generation_config.json", "tokenizer_config.json"]
    described += ["preprocessor_config.json", "processor_config.json"]
    described += ["modules.json", "sentence_bert_config.json", "[0-9]_*/config.json"]
    assert hub.calls[0]["allow_patterns"] == described


def test_an_adapter_is_two_downloaded_files_or_a_local_folder(hub: FakeHub) -> None:
    assert resolve_adapter("owner/name") == hub.snapshot
    assert hub.calls[0]["allow_patterns"] == ["adapter_config.json", "adapter_model.safetensors"]
    assert resolve_adapter(str(hub.snapshot)) == hub.snapshot
    assert len(hub.calls) == 1
    for source in ("/no/such/folder", "owner/name:FILE.gguf"):
        with pytest.raises(ConfigError, match="expected an existing folder, or owner/name on the Hugging Face hub"):
            resolve_adapter(source)


def test_a_repository_is_downloaded_with_pooling_and_chat_templates_but_no_second_copy(hub: FakeHub) -> None:
    (hub.snapshot / "model.safetensors").touch()
    resolve("owner/name")
    files = ["config.json", "model.safetensors", "modules.json", "vocab.txt", "merges.txt", "1_Pooling/config.json"]
    files += [
        "2_Dense/config.json",
        "2_Dense/model.safetensors",
        "0_Transformer/vocab.txt",
        "0_Transformer/tokenizer.json",
    ]
    files += ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"]
    others = ["pytorch_model.bin", "onnx/config.json", "original/model.safetensors", "16bit/tokenizer.json"]
    others += ["assets/tokenizer.json", "adapter/config.json", "original/chat_template.jinja"]
    call = hub.calls[-1]
    fetched = filter_repo_objects(
        files + others, allow_patterns=call["allow_patterns"], ignore_patterns=call["ignore_patterns"]
    )
    assert list(fetched) == files


def test_shards_are_fetched_under_the_names_that_the_index_has(hub: FakeHub) -> None:
    (hub.snapshot / "layers-0.safetensors").touch()
    shards = {
        "a": "layers-0.safetensors",
        "b": "mtp.safetensors",
        "c": "model-1-of-1.safetensors",
        "d": "x[1].safetensors",
    }
    index = hub.snapshot / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    for needs_tokenizer in (True, False):
        resolve("owner/name", needs_tokenizer=needs_tokenizer)
        call = hub.calls[-1]
        fetched = filter_repo_objects(
            [*shards.values(), "other.safetensors", "outer/mtp.safetensors"],
            allow_patterns=call["allow_patterns"],
            ignore_patterns=call["ignore_patterns"],
        )
        assert list(fetched) == list(shards.values())
    index.write_text("{")
    assert rejection("owner/name").startswith(f"{index}: expected JSON, found")


def test_hub_file_fetches_that_file_only(hub: FakeHub) -> None:
    (hub.snapshot / "Tiny[1].Q4_K_M.gguf").touch()
    assert resolve("owner/name:Tiny[1].Q4_K_M.gguf", progress=False) == hub.snapshot / "Tiny[1].Q4_K_M.gguf"
    assert hub.calls[0]["allow_patterns"] == ["Tiny[[]1].Q4_K_M.gguf"]


def test_hub_file_of_a_split_model_fetches_all_of_its_files(hub: FakeHub) -> None:
    names = [f"Q4[K]/big-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    (hub.snapshot / "Q4[K]").mkdir()
    for name in names:
        (hub.snapshot / name).touch()
    assert resolve(f"owner/name:{names[0]}") == hub.snapshot / names[0]
    call = hub.calls[0]
    others = ["Q8/big-00002-of-00003.gguf", "Q4[K]/big-00004-of-00004.gguf", "config.json"]
    fetched = filter_repo_objects(
        names + others, allow_patterns=call["allow_patterns"], ignore_patterns=call["ignore_patterns"]
    )
    assert list(fetched) == names
    (hub.snapshot / names[2]).unlink()
    assert rejection(f"owner/name:{names[0]}") == (
        f"model owner/name:{names[0]}: expected '{names[2]}' in the repository, found no such file"
    )
    assert rejection(f"owner/name:{names[1]}", ConfigError) == (
        f"model owner/name:{names[1]}: is not the first file of a split model; give owner/name:{names[0]}"
    )
    assert len(hub.calls) == 2


def test_progress_bars_are_shown_unless_declined(hub: FakeHub) -> None:
    (hub.snapshot / "model.safetensors").touch()
    resolve("owner/name")
    resolve("owner/name", progress=False)
    resolve("owner/name", progress=True)
    assert [call["bars"] for call in hub.calls[1::2]] == [True, False, True]


@pytest.mark.parametrize(
    "model",
    [
        "./nope",
        "/nope/model",
        "../owner/name",
        "~/nope",
        "nope",
        "nope.gguf",
        "owner/name.gguf",
        "a/b/c",
        "",
        "a b/c",
        "/x" * 60 + "/" + "y" * 300,
        "~nobody-here/m",
    ],
)
def test_path_that_does_not_exist_says_so(hub: FakeHub, model: str) -> None:
    message = rejection(model, ConfigError)
    shown = model if len(model) <= 200 else model[:200] + "..."
    assert message == (
        f"model {shown!r}: expected an existing file or directory, owner/name on the Hugging Face hub, or "
        "owner/name:FILE.gguf; found no such path"
    )
    assert hub.calls == []


def test_repository_without_safetensors_is_rejected(hub: FakeHub) -> None:
    (hub.snapshot / "config.json").touch()
    assert rejection("owner/name") == (
        "model owner/name: expected model*.safetensors in the repository, found none (pickle weights are not read); "
        "choose a repository with safetensors, or one GGUF file as owner/name:FILE.gguf"
    )


def test_file_missing_from_the_repository_is_named(hub: FakeHub) -> None:
    message = rejection("owner/name:a.gguf")
    assert message == "model owner/name:a.gguf: expected 'a.gguf' in the repository, found no such file"


def connection_error() -> Exception:
    return httpx2.ConnectError("[Errno -2] Name or service not known")


FAILURES: dict[str, tuple[Callable[[], Exception], str]] = {
    "gated": (
        lambda: http_error(hub_errors.GatedRepoError, 403),
        "the repository is gated; accept its terms on https://huggingface.co/owner/name and set HF_TOKEN",
    ),
    "not found": (
        lambda: http_error(hub_errors.RepositoryNotFoundError, 401),
        "no such repository on the hub, or it is private; check the name, or set HF_TOKEN",
    ),
    "revision": (lambda: http_error(hub_errors.RevisionNotFoundError, 404), "the repository has no such revision"),
    "offline": (
        lambda: caused(hub_errors.LocalEntryNotFoundError("x\ny"), hub_errors.OfflineModeIsEnabled("offline")),
        "not wholly in the local cache, and HF_HUB_OFFLINE is set; unset it, or give a local path",
    ),
    "offline at once": (
        lambda: hub_errors.OfflineModeIsEnabled("offline"),
        "not wholly in the local cache, and HF_HUB_OFFLINE is set; unset it, or give a local path",
    ),
    "no network": (
        lambda: caused(hub_errors.LocalEntryNotFoundError("x\ny"), connection_error()),
        "not wholly in the local cache, and the hub cannot be reached (ConnectError: [Errno -2] Name or service not "
        "known); check the network",
    ),
    "interrupted": (
        lambda: hub_errors.IncompleteSnapshotError("x\ny", "/cache"),
        "not wholly in the local cache, and the hub cannot be reached; check the network",
    ),
    "network lost": (
        connection_error,
        "the download failed (ConnectError: [Errno -2] Name or service not known); check the network and the free "
        "disk space, then try again",
    ),
    "hub down": (
        lambda: http_error(hub_errors.HfHubHTTPError, 503, "503 Server Error\nRequest ID: 1"),
        "the hub answered 503 Server Error; try again later",
    ),
    "file gone": (
        lambda: http_error(hub_errors.RemoteEntryNotFoundError, 404),
        "the repository has none of the files *.json, tokenizer*, vocab.txt, merges.txt, tiktoken.model, *.jinja",
    ),
    "disk full": (
        lambda: OSError(28, "No space left on device"),
        "the download failed (OSError: [Errno 28] No space left on device); check the network and the free disk space",
    ),
}


@pytest.mark.parametrize("case", FAILURES)
def test_failure_is_one_line_that_says_what_to_do(hub: FakeHub, case: str) -> None:
    make_error, message = FAILURES[case]
    hub.error = make_error()
    assert rejection("owner/name", revision="v2").startswith(f"model owner/name at revision 'v2': {message}")


def test_invalid_id_is_a_configuration_error(hub: FakeHub) -> None:
    hub.error = hub_errors.HFValidationError("Repo id must use alphanumeric chars")
    assert rejection("owner/na--me", ConfigError).startswith("model owner/na--me: not a hub id: Repo id must use")


def test_offline_hub_answers_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real snapshot_download, which must not reach for the network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert rejection("owner/name") == (
        "model owner/name: not wholly in the local cache, and HF_HUB_OFFLINE is set; unset it, or give a local path"
    )


def test_a_user_without_a_home_directory_is_asked_for_a_folder(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", "~/.cache/huggingface/hub")
    assert "set HF_HOME" in rejection("owner/name", ConfigError)
    assert not hub.calls
