"""Settings of the model, its precision and its adapters."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from jaxserve.config.option import option
from jaxserve.errors import ConfigError
from jaxserve.types import LogprobsMode

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Task = Literal["auto", "generate", "embed"]
PoolingChoice = Literal["auto", "last", "mean", "cls"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The model and its precision."""

    model: str = option(help="GGUF file, Hugging Face directory, hub id (`owner/name`), or `default`")
    revision: str | None = option(None, help="hub branch, tag or commit")
    served_model_name: str | None = option(
        None, help="names that requests may use, comma separated; replies have the first one (default: MODEL)"
    )
    lora_modules: str | None = option(
        None,
        help="LoRA adapters to serve with the model, NAME=PATH (a folder saved by PEFT, or a hub id), comma "
        "separated; a request selects one with its name as `model`",
    )
    max_loras: int | None = option(
        None,
        ge=1,
        le=1024,
        help="places for LoRA adapters, those of --lora-modules among them; adapters that are loaded while serving take "
        "the others (default: as many as --lora-modules has)",
    )
    max_lora_rank: int | None = option(
        None,
        ge=1,
        le=512,
        help="largest rank of an adapter that is loaded while serving (default: 16, or that of --lora-modules)",
    )
    dtype: Dtype = option(
        "auto",
        help="type of weights and, on accelerators, of activations and KV cache (float32 on CPUs); auto: float32 on CPUs, "
        "else bfloat16",
    )
    quantization: str = option(
        "auto",
        choices_from="jaxserve.quant.names:format_names",
        help="int8, fp8 (e4m3): weights, with one scale per output, and activations, with one scale per token; "
        "-weight-only: weights only; int4 has one scale per group of inputs, fp8-block one per block; mxfp4: experts in blocks of 32; nvfp4: blocks of 16; gguf: the blocks of a GGUF file, and int8 "
        "activations; auto: the checkpoint's format, but GGUF files dequantised",
    )
    max_model_len: int | None = option(None, ge=1, help="longest prompt + output in tokens (default: the model's)")
    seed: int = option(0, ge=0, help="seed from which the seeds of requests without one are drawn")
    chat_template: str | None = option(
        None, unit="path", help="path of a Jinja chat template, used instead of the model's"
    )
    generation_config: str = option(
        "auto",
        help="source of the default temperature, top_k, top_p, min_p and repetition_penalty; auto: the checkpoint's "
        "generation_config.json; none: temperature 1, nothing else; or the path of such a file or its folder",
    )
    logprobs_mode: LogprobsMode = option("raw_logprobs", help="log-probabilities before or after sampling options")
    enable_return_routed_experts: bool = option(
        False, help="let requests ask for the experts that their tokens chose (`return_routed_experts`)"
    )
    task: Task = option(
        "auto",
        help="generate: text; embed: vectors, scores or labels of texts; auto: embed for encoders and for models that score or label, "
        "else generate",
    )
    pooling: PoolingChoice = option(
        "auto",
        help="how a text's vector is made from its tokens' vectors; auto: the checkpoint's modules.json, else last for "
        "decoders and mean for encoders",
    )

    classifier_from_token: str | None = option(
        None,
        help="score texts with a model that generates: two tokens, separated by a comma, of which the logit of the first (no) "
        "is subtracted from that of the second (yes), or one token; implies --task embed",
    )
    hf_overrides: str | None = option(
        None,
        unit="json",
        help="JSON object that is merged into the model's config.json before it is read: tables are merged, other values and lists "
        "replaced",
    )
    hf_overrides_dir: str | None = option(
        None,
        unit="path",
        help="directory of the folders that --hf-overrides makes, of the merged config.json and links to the model's files (default: "
        "jaxserve/overrides in $XDG_CACHE_HOME or ~/.cache)",
    )

    def __post_init__(self) -> None:
        count = len(self.adapters)
        if self.max_lora_rank is not None and self.max_loras is None:
            raise ConfigError(f"--max-lora-rank {self.max_lora_rank}: needs --max-loras")
        if self.max_loras is not None and count > self.max_loras:
            raise ConfigError(f"--max-loras {self.max_loras}: --lora-modules has {count} adapters")
        if self.classifier_from_token is not None and not 1 <= len(self.classifier_from_token.split(",")) <= 2:
            raise ConfigError("--classifier-from-token: expected one token, or two separated by a comma")
        if self.task == "generate":
            self.check_generates()

    @property
    def overrides(self) -> dict[str, Any]:
        """Object of `hf_overrides`; empty without one."""
        found = {} if self.hf_overrides is None else json.loads(self.hf_overrides)
        assert isinstance(found, dict), "checked where settings are read"
        return found

    @property
    def adapters(self) -> dict[str, str]:
        """Path of each adapter of `lora_modules`, by name."""
        adapters: dict[str, str] = {}
        for entry in filter(None, (part.strip() for part in (self.lora_modules or "").split(","))):
            name, separator, path = (part.strip() for part in entry.partition("="))
            if not (name and separator and path):
                raise ConfigError(f"--lora-modules {entry!r}: expected NAME=PATH")
            if name in adapters:
                raise ConfigError(f"--lora-modules: two adapters have the name {name!r}")
            adapters[name] = path
        return adapters

    @property
    def num_adapter_places(self) -> int:
        """Number of adapters that can be loaded at the same time."""
        return len(self.adapters) if self.max_loras is None else self.max_loras

    def check_generates(self) -> None:
        """Raise ConfigError for settings that need the task `embed`."""
        if self.task == "embed":
            raise ConfigError("--task embed: `compile` and `convert` support the task generate only")
        if self.pooling != "auto":
            raise ConfigError(f"--pooling {self.pooling}: needs --task embed")
        if self.classifier_from_token is not None:
            raise ConfigError(f"--classifier-from-token {self.classifier_from_token}: not with --task generate")
