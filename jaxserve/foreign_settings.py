"""Advice for settings that only vLLM, llama.cpp or SGLang has.

It imports nothing of the settings, so that the command can ask it without loading them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_ALWAYS: Final = "not needed: always on"
_CHECKPOINT: Final = "not supported: the checkpoint decides"
_COMPILER: Final = "not needed: no request waits for a compiler"
_LAYERS: Final = "not needed: all layers are on the devices"
_MEMORY: Final = "not needed: weights are read into memory"
_MODEL: Final = "the model is given without a flag: `jaxserve serve MODEL`"
_PROCESSORS: Final = "not needed: each processor that the process may use has a thread (`taskset` limits them)"
_PROXY: Final = "not supported: use a proxy"
_REQUESTS: Final = "requests are logged with `--access-log`, without their prompts"
_SPECULATION: Final = "use `--num-speculative-tokens`, `--speculative-model` and `--speculative-method`"
_TEMPLATE: Final = "not needed: the checkpoint's template is used, or that of `--chat-template`"
ADVICE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "O": _COMPILER,
        "a": "use `--served-model-name`",
        "alias": "use `--served-model-name`",
        "allowed_origins": "use `--cors-allowed-origins`",
        "api_server_count": "use `--api-processes`",
        "async_scheduling": "use `--overlap`",
        "b": "use `--max-num-batched-tokens`",
        "batch_size": "use `--max-num-batched-tokens`",
        "c": "use `--max-model-len`",
        "cache_type_k": "use `--kv-cache-dtype`",
        "cache_type_v": "use `--kv-cache-dtype`",
        "cb": _ALWAYS,
        "chat_template_file": "use `--chat-template`",
        "compilation_config": _COMPILER,
        "cont_batching": _ALWAYS,
        "context_length": "use `--max-model-len`",
        "ctk": "use `--kv-cache-dtype`",
        "ctv": "use `--kv-cache-dtype`",
        "ctx_size": "use `--max-model-len`",
        "disable_log_requests": _REQUESTS,
        "disable_log_stats": "not needed: statistics are at /metrics and not in the log",
        "draft": "use `--num-speculative-tokens`",
        "draft_max": "use `--num-speculative-tokens`",
        "embedding": "use `--task`",
        "embeddings": "use `--task`",
        "enable_auto_tool_choice": "not needed: on if the format of the model's calls is known (`--tool-call-parser`)",
        "enable_chunked_prefill": _ALWAYS,
        "enable_log_requests": _REQUESTS,
        "enable_lora": "not needed: adapters are named by `--lora-modules`",
        "enable_reasoning": "not needed: `--reasoning-parser` names the format",
        "enforce_eager": _COMPILER,
        "fa": _ALWAYS,
        "flash_attn": _ALWAYS,
        "gpu_layers": _LAYERS,
        "gpu_memory_utilization": "use `--memory-fraction`",
        "hf_repo": _MODEL,
        "jinja": _TEMPLATE,
        "kv_cache_memory_bytes": "use `--kv-cache-memory`, of all devices together",
        "load_format": _CHECKPOINT,
        "lora": "use `--lora-modules`",
        "m": _MODEL,
        "max_running_requests": "use `--max-num-seqs`",
        "md": "use `--speculative-model`",
        "mem_fraction_static": "use `--memory-fraction`",
        "mlock": _MEMORY,
        "model_draft": "use `--speculative-model`",
        "model_path": _MODEL,
        "n_gpu_layers": _LAYERS,
        "ngl": _LAYERS,
        "no_async_scheduling": "use `--no-overlap`",
        "no_enable_log_requests": _REQUESTS,
        "no_mmap": _MEMORY,
        "no_webui": "use `--no-ui`",
        "np": "use `--max-num-seqs`",
        "override_generation_config": "use `--generation-config FILE`",
        "parallel": "use `--max-num-seqs`",
        "pipeline_parallel_size": "not supported: use `--tensor-parallel-size`",
        "pp": "not supported: use `--tensor-parallel-size`",
        "q": "use `--quantization`",
        "root_path": _PROXY,
        "speculative_config": _SPECULATION,
        "swap_space": "use `--kv-offload-memory`",
        "t": _PROCESSORS,
        "tb": _PROCESSORS,
        "threads": _PROCESSORS,
        "threads_batch": _PROCESSORS,
        "tokenizer": _CHECKPOINT,
        "tokenizer_mode": _CHECKPOINT,
        "tp": "use `--tensor-parallel-size`",
        "tp_size": "use `--tensor-parallel-size`",
        "trust_remote_code": "never: no code of a checkpoint is executed",
        "ub": "use `--max-num-batched-tokens`",
        "ubatch_size": "use `--max-num-batched-tokens`",
        "uds": _PROXY,
    }
)
"""By the name of the setting, spelled as in a config file; the texts name settings of this server as flags."""


def advice_for_flag(flag: str) -> str | None:
    """Return what to use instead of `flag`; None if no server that is known here has it."""
    return ADVICE.get(flag.lstrip("-").replace("-", "_"))


def advice_for_name(name: str) -> str | None:
    """Return what to use instead of the setting `name` of a file or of `LLM`; None if no server that is known here has it."""
    advice = ADVICE.get(name)
    return advice and re.sub(r"`--([a-z-]+)", lambda found: "`" + found[1].replace("-", "_"), advice)
