"""The committed references: outputs of transformers for the checkpoints of `data/` and for SmolLM2.

`tests/tools/` holds the scripts that write them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

DATA = Path(__file__).parent / "data"
REMOTE_CODE: Final = (
    "BailingMoeForCausalLM",
    "BailingMoeV2ForCausalLM",
    "DeciLMForCausalLM",
    "ExaoneForCausalLM",
    "InternLM2ForCausalLM",
    "MiniCPMForCausalLM",
    "SarvamMoEForCausalLM",
)
"""Models that ship as code: transformers has no class for them, and no defaults. `tests/tools/remote_code.py` computes their references."""


@dataclass(frozen=True, slots=True)
class GoldenCheckpoint:
    """A tiny Hugging Face directory and its reference, in float32 from exactly the stored weights."""

    name: str
    path: Path
    prompt_ids: np.ndarray
    """int32 (T)"""
    logits: np.ndarray
    """float32 (8, V): of the last 8 prompt positions."""
    output_ids: np.ndarray
    """int32 (64): greedy after the prompt, not stopping at end tokens."""
    gaps: np.ndarray
    """float32 (64): between the two best logits at each output."""


@dataclass(frozen=True, slots=True)
class SmolLM2Golden:
    """A prompt for SmolLM2-135M-Instruct (Q4_1, dequantised to float32) and 64 greedy tokens."""

    name: str
    text: str | None
    """A plain prompt, or None where `messages` are the prompt."""
    messages: tuple[dict[str, str], ...]
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    """Not stopping at end tokens."""
    gaps: tuple[float, ...]
    """Between the two best logits at each output."""
    output_text: str
    """`output_ids` decoded, control tokens included."""


def golden_names() -> list[str]:
    """Return the names of all tiny checkpoints, in order. Nothing is read: each worker collects the tests of all of them."""
    return [path.parent.name for path in sorted(DATA.glob("*/golden.npz"))]


def golden_checkpoint(name: str) -> GoldenCheckpoint:
    """Read one tiny checkpoint."""
    path = DATA / name
    with np.load(path / "golden.npz", allow_pickle=False) as arrays:
        return GoldenCheckpoint(
            name, path, arrays["prompt_ids"], arrays["logits"], arrays["output_ids"], arrays["gaps"]
        )


MTP_NAMES: Final = (
    "glm4",
    "glm4_moe",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "qwen3_5",
    "qwen3_next",
    "mimo",
    "mimo_v2_flash",
    "ernie4_5_moe",
    "step3p5",
    "hy_v3",
    "hy_v4",
    "glm5_next",
    "bailing_hybrid",
    "minimax_m3",
)
"""Checkpoints with a multi-token-prediction layer."""


@dataclass(frozen=True, slots=True)
class MTPGolden:
    """A tiny checkpoint with a multi-token-prediction layer, and what transformers computes with the layer in float32."""

    path: Path
    prompt_ids: np.ndarray
    """int32 (40)"""
    output_ids: np.ndarray
    """int32 (2): the model's greedy tokens after the prompt."""
    logits: np.ndarray
    """float32 (8, V): of the layer, for the last 7 tokens of the prompt and the first output."""
    draft_ids: np.ndarray
    """int32 (3): greedy tokens of the layer after the outputs."""
    draft_logits: np.ndarray
    """float32 (3, V)"""


def mtp_golden(name: str) -> MTPGolden:
    """One checkpoint of `MTP_NAMES`."""
    path = DATA / "mtp" / name
    with np.load(path / "golden.npz", allow_pickle=False) as arrays:
        return MTPGolden(path, **arrays)


@dataclass(frozen=True, slots=True)
class AssistantGolden:
    """A tiny drafter of Gemma 4, and what transformers drafts with it in float32."""

    target: Path
    """The model that it drafts for."""
    path: Path
    prompt_ids: np.ndarray
    """int32 (40)"""
    output_ids: np.ndarray
    """int32 (6): the model's greedy tokens after the prompt."""
    draft_ids: np.ndarray
    """int32 (5, 3): greedy tokens of the drafter after 2 to 6 of the outputs."""
    draft_logits: np.ndarray
    """float32 (5, 3, V)"""


def assistant_golden(name: str) -> AssistantGolden:
    """Return the drafter of the tiny checkpoint `name`."""
    path = DATA / "assistants" / name
    with np.load(path / "golden.npz", allow_pickle=False) as arrays:
        return AssistantGolden(DATA / name, path, **arrays)


def routing_goldens() -> dict[str, np.ndarray]:
    """Return the experts of the tokens of prompt and output but the last by checkpoint: uint8 (T, L, k), ascending."""
    with np.load(DATA / "routing.npz", allow_pickle=False) as arrays:
        return dict(arrays)


@dataclass(frozen=True, slots=True)
class AdapterGolden:
    """An adapter of a tiny checkpoint, and what PEFT makes of the two, in float32 and not merged."""

    path: Path
    prompt_ids: np.ndarray
    """int32 (40)"""
    logits: np.ndarray
    """float32 (8, V): of the last 8 prompt positions."""
    output_ids: np.ndarray
    """int32 (32): greedy after the prompt, not stopping at end tokens."""


def adapter_goldens(name: str) -> dict[str, AdapterGolden]:
    """Return the goldens of a checkpoint by adapter name; "base" is the checkpoint without adapters."""
    directory = DATA / "adapters" / name
    with np.load(directory / "golden.npz", allow_pickle=False) as arrays:
        adapters = dict.fromkeys(key.partition("/")[0] for key in arrays.files if "/" in key)
        return {
            adapter: AdapterGolden(
                directory / adapter, arrays["prompt_ids"], arrays[f"{adapter}/logits"], arrays[f"{adapter}/output_ids"]
            )
            for adapter in adapters
        }


def smollm2_goldens() -> list[SmolLM2Golden]:
    """The twenty prompts, in file order."""
    entries = json.loads((DATA / "smollm2" / "golden.json").read_text(encoding="utf-8"))
    return [
        SmolLM2Golden(
            name=entry["name"],
            text=entry.get("text"),
            messages=tuple(entry.get("messages", ())),
            prompt_ids=tuple(entry["prompt_ids"]),
            output_ids=tuple(entry["output_ids"]),
            gaps=tuple(entry["gaps"]),
            output_text=entry["output_text"],
        )
        for entry in entries
    ]


def rope_goldens() -> dict[str, dict[str, Any]]:
    """By case: `config` (a Llama config.json without `architectures`), `inv_freq` (H / 2), `attention_factor`."""
    found: dict[str, dict[str, Any]] = json.loads((DATA / "rope.json").read_text())
    return found


def config_goldens() -> dict[str, dict[str, Any]]:
    """`layers` by case (`config`, `saved`, `windows`, `use_rope`) and `defaults` by architecture."""
    found: dict[str, dict[str, Any]] = json.loads((DATA / "configs.json").read_text())
    return found


@dataclass(frozen=True, slots=True)
class EncoderGolden:
    """A tiny encoder and what it makes of texts of different lengths, each computed alone in float32."""

    path: Path
    token_ids: list[np.ndarray]
    """int32 (T) each"""
    hidden: list[np.ndarray]
    """float32 (T, D) each"""


def encoder_golden(name: str) -> EncoderGolden:
    """One tiny encoder."""
    path = DATA / "encoders" / name
    with np.load(path / "golden.npz", allow_pickle=False) as arrays:
        count = len(arrays.files) // 2
        return EncoderGolden(
            path, [arrays[f"ids_{i}"] for i in range(count)], [arrays[f"hidden_{i}"] for i in range(count)]
        )


@dataclass(frozen=True, slots=True)
class SentenceGolden:
    """A tiny model as sentence-transformers saves it, and the vectors of its last module, of texts computed alone in float32."""

    path: Path
    token_ids: list[np.ndarray]
    """int32 (T) each"""
    vectors: np.ndarray
    """float32 (texts, D)"""


def sentence_golden(name: str) -> SentenceGolden:
    """One model of `sentence_goldens`."""
    path = DATA / "encoders" / name
    with np.load(path / "golden.npz", allow_pickle=False) as arrays:
        vectors = arrays["vectors"]
        return SentenceGolden(path, [arrays[f"ids_{i}"] for i in range(len(vectors))], vectors)


def sentence_goldens() -> list[str]:
    """The names of models that tests/tools/make_sentence_goldens.py writes and that embed."""
    return _names_with("vectors")


def pair_goldens() -> list[str]:
    """The names of models that it writes and that score texts; all end in a sigmoid."""
    return [name for name in _names_with("scores") if not name.startswith(("bert", "roberta"))]


def _names_with(array: str) -> list[str]:
    files = sorted((DATA / "encoders").glob("*/golden.npz"))
    return [file.parent.name for file in files if array in np.load(file, allow_pickle=False).files]


@dataclass(frozen=True, slots=True)
class PairGolden:
    """A tiny cross-encoder and what it makes of pairs."""

    path: Path
    token_ids: list[np.ndarray]
    """int32 (T) each"""
    text_pair_starts: list[int | None]
    """Start of the second text of each pair, if the model has token types."""
    scores: np.ndarray
    """float32 (pairs), before any sigmoid"""


def pair_golden(name: str) -> PairGolden:
    """One tiny cross-encoder."""
    path = DATA / "encoders" / name
    with np.load(path / "golden.npz", allow_pickle=False) as arrays:
        scores = arrays["scores"]
        types = [arrays[f"types_{i}"].tolist() for i in range(len(scores))]
        starts = [ones.index(1) if 1 in ones else None for ones in types]
        return PairGolden(path, [arrays[f"ids_{i}"] for i in range(len(scores))], starts, scores)


@dataclass(frozen=True, slots=True)
class LabelGolden:
    """A tiny classifier and what it makes of texts."""

    path: Path
    token_ids: list[np.ndarray]
    """int32 (T) each"""
    logits: np.ndarray
    """float32 (texts, labels)"""
    probabilities: np.ndarray
    """float32 (sentences, labels): of the sentences of tests/tools/make_sentence_goldens.py"""


def label_golden(name: str) -> LabelGolden:
    """One tiny classifier."""
    path = DATA / "encoders" / name
    with np.load(path / "golden.npz", allow_pickle=False) as arrays:
        logits = arrays["logits"]
        token_ids = [arrays[f"ids_{i}"] for i in range(len(logits))]
        return LabelGolden(path, token_ids, logits, arrays["probabilities"])


@dataclass(frozen=True, slots=True)
class VectorGolden:
    """A model's embeddings of prompts."""

    token_ids: list[np.ndarray]
    """int32 (T) each"""
    vectors: dict[str, np.ndarray]
    """float32 (prompts, D) by pooling."""


def minilm_golden() -> VectorGolden:
    """The texts of tests/tools/embedding_texts.py; the average, normalised."""
    with np.load(DATA / "minilm.npz", allow_pickle=False) as arrays:
        count = len(arrays.files) - 1
        return VectorGolden([arrays[f"ids_{i}"] for i in range(count)], {"mean": arrays["vectors"]})


def decoder_vectors(name: str) -> VectorGolden:
    """Return the embeddings of a decoder, not normalised."""
    with np.load(DATA / "embeddings.npz", allow_pickle=False) as arrays:
        vectors = {pooling: arrays[f"{name}/{pooling}"] for pooling in ("last", "mean")}
        return VectorGolden([arrays[f"{name}/ids_{i}"] for i in range(len(vectors["last"]))], vectors)
