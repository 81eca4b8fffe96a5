"""Find a checkpoint's family among the modules of `families/` (decoders) and `encoders/`, and read its config."""

from __future__ import annotations

import contextlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Final, TypeVar

from jaxserve.checkpoint.converted import is_converted
from jaxserve.checkpoint.drafters.form import DrafterInputs, drafter_form
from jaxserve.checkpoint.drafters.mtp import mtp_config
from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.files import read_config, read_object
from jaxserve.checkpoint.huggingface import open_drafter, open_mtp_layer
from jaxserve.checkpoint.image_processor import FILES, read_image_processor
from jaxserve.checkpoint.maxtext.folder import is_orbax
from jaxserve.checkpoint.open import open_checkpoint
from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.checkpoint.renamed import MULTIMODAL, SCORES, TIED, architecture, is_tied_in_part, text_config
from jaxserve.errors import CheckpointError
from jaxserve.model_config.checkpoint_quantization import CheckpointQuantization, KVScaleDtype
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.embedding_head import HeadLayer
from jaxserve.model_config.encoder import EncoderConfig
from jaxserve.model_config.predictor import DFlashConfig, EagleConfig
from jaxserve.models import encoders as encoders_package
from jaxserve.models import families as families_package
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._labels import label_head
from jaxserve.models.nearest import differences, nearest_family, unread_overrides
from jaxserve.models.output_head import has_own_head
from jaxserve.quant.kv_scales import kv_scale_dtype
from jaxserve.quant.names import NO_QUANTIZATION
from jaxserve.quant.registry import read_form
from jaxserve.quant.stored_blocks import stored_kinds

_MAX_TOKEN_ID: Final = (1 << 31) - 1
_ALIBI: Final = ("FalconForCausalLM", "attention scores with a linear bias by distance (ALiBi)")
_INKLING: Final = (
    "ZayaForCausalLM",
    "attention scores with a term by distance that each query computes, convolved outputs of blocks, and shared experts among the "
    "weights of the router",
)
_ASSISTANT: Final = (
    "Gemma4ForCausalLM",
    "keys and values of its own: it drafts for a Gemma 4, as its --speculative-model",
)
_SHARED: Final = "a block of attention that several layers share and whose input is twice as wide"
_JOINED_TILES: Final = (
    "tiles of an image whose rows of features are joined, cut to the image, and end with a learned vector each"
)
_SAM: Final = "the tower SAM, whose windows have relative positions"
_ERNIE_VL: Final = (
    "Ernie4_5_MoeForCausalLM",
    "experts of their own for the tokens of images, and positions by row and column in turn before those by time",
)
_PHI4: Final = ("Phi3ForCausalLM", "matrices of low rank that are added for prompts with images only")
_DOTS3: Final = ("DeepseekV32ForCausalLM", "latent attention with windows and a norm of the rotating key")
_MISSING: Final[Mapping[str, tuple[str, str]]] = {
    "Granite4VisionForConditionalGeneration": ("GraniteForCausalLM", f"{_JOINED_TILES}, and a Q-Former over windows"),
    "Idefics2ForConditionalGeneration": ("MistralForCausalLM", "a resampler of an image's features"),
    "Ernie4_5_VLMoeForConditionalGeneration": _ERNIE_VL,
    "Ernie4_5_VL_MoeForConditionalGeneration": _ERNIE_VL,
    "AriaForConditionalGeneration": ("DeepseekV2ForCausalLM", "queries that attend to an image's features"),
    "Molmo2ForConditionalGeneration": ("Qwen3ForCausalLM", "attention of a block's mean to features of several layers"),
    "FastVlmForConditionalGeneration": ("Qwen2ForCausalLM", "the tower FastViT, which has convolutions"),
    "PerceptionLMForConditionalGeneration": ("LlamaForCausalLM", "the tower Perception Encoder"),
    "Phi4MultimodalForCausalLM": _PHI4,
    "Phi4MMForCausalLM": _PHI4,
    "MllamaForConditionalGeneration": ("LlamaForCausalLM", "attention of texts to an image's features"),
    "LongcatFlashForCausalLM": (
        "DeepseekV3ForCausalLM",
        "layers with two attentions and two feed-forward blocks beside their experts, of which some return their input",
    ),
    "KimiVLForConditionalGeneration": ("DeepseekV3ForCausalLM", "its preprocessing and its projector"),
    "HunYuanVLForConditionalGeneration": (
        "HunYuanDenseV1ForCausalLM",
        "four positions of a token, of which two turn each pair of numbers, and learned embeddings after rows of an image's tokens",
    ),
    "DeepseekOCRForCausalLM": ("DeepseekV2ForCausalLM", f"{_SAM}, before one of CLIP"),
    "DeepseekOCR2ForCausalLM": ("DeepseekV2ForCausalLM", f"{_SAM}, before an encoder with queries"),
    "DeepseekOcr2ForConditionalGeneration": ("DeepseekV2ForCausalLM", f"{_SAM}, before an encoder with queries"),
    "UnlimitedOcrForConditionalGeneration": (
        "DeepseekV2ForCausalLM",
        f"{_SAM}, before one of CLIP, and sliding windows that keep the prompt",
    ),
    "GotOcr2ForConditionalGeneration": ("Qwen2ForCausalLM", _SAM),
    "InternVLChatModel": ("Qwen2ForCausalLM", "tensors with transformers' names, as in checkpoints that end in -hf"),
    "Dots3NoteForCausalLM": _DOTS3,
    "Dots3NoteForConditionalGeneration": _DOTS3,
    "Gemma4AssistantForCausalLM": _ASSISTANT,
    "Gemma4UnifiedAssistantForCausalLM": _ASSISTANT,
    "MuseSparkForConditionalGeneration": (
        "MuseGlimmerTextModel",
        "gates on residuals, and norms of the outputs of heads and of each expert",
    ),
    "RecurrentGemmaForCausalLM": ("GemmaForCausalLM", "real-gated linear recurrent units"),
    "DiffLlamaForCausalLM": ("LlamaForCausalLM", "differences of two attentions with learned factors"),
    "JetMoeForCausalLM": ("MixtralForCausalLM", "experts among the projections of attention"),
    "DogeForCausalLM": (
        "LlamaForCausalLM",
        "attention to keys that values choose, and experts chosen by products of keys",
    ),
    "HrmTextForCausalLM": (
        "LlamaForCausalLM",
        "layers that are applied several times, and attention in both directions over a prompt",
    ),
    "InklingForConditionalGeneration": _INKLING,
    "InklingForCausalLM": _INKLING,
    "Zamba2ForCausalLM": ("BambaForCausalLM", f"{_SHARED}, and matrices of low rank for each use of it"),
    "ZambaForCausalLM": ("JambaForCausalLM", _SHARED),
    "BloomForCausalLM": _ALIBI,
    "MptForCausalLM": _ALIBI,
    "MPTForCausalLM": _ALIBI,
}
"""Nearest family and missing features of well-known architectures that are not served."""

T = TypeVar("T")
ReadEncoderConfig = Callable[[dict[str, Any]], EncoderConfig]


@cache
def families() -> tuple[Family, ...]:
    """Return the FAMILY of every module in `families/`."""
    return tuple(module.FAMILY for module in _modules(families_package))


@cache
def architectures() -> Mapping[str, Family]:
    """Return the decoder families by the name that `config.json` gives in `architectures`."""
    return _by_name((name, family) for family in families() for name in family.architectures)


@cache
def encoder_architectures() -> Mapping[str, ReadEncoderConfig]:
    """Return the functions that read encoder configs, by the name that `config.json` gives in `architectures`."""
    return _by_name(
        (name, module.encoder_config) for module in _modules(encoders_package) for name in module.ARCHITECTURES
    )


def open_model(path: Path, mmproj: Path | None = None) -> Checkpoint:
    """Open the checkpoint of any known family, or of an encoder; raise CheckpointError in one line.

    mmproj: the GGUF file with the image encoder of a GGUF text model.
    """
    return open_checkpoint(path, families(), mmproj)


def _modules(package: ModuleType) -> Iterator[ModuleType]:
    for module_info in pkgutil.iter_modules(package.__path__):
        if not module_info.name.startswith("_"):
            yield import_module(f"{package.__name__}.{module_info.name}")


def _by_name(claims: Iterable[tuple[str, T]]) -> Mapping[str, T]:
    found: dict[str, T] = {}
    for name, value in claims:
        if name in found:
            raise RuntimeError(f"two families claim {name}")
        found[name] = value
    return MappingProxyType(found)


def decoder_config(hf: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> DecoderConfig:
    """Read `config.json`, and the end tokens of `generation_config.json`.

    Raises CheckpointError naming the key for an architecture or a value that is not supported.
    """
    family, form = family_of(hf), read_form(hf)
    config = family.decoder_config(dict(hf))
    if hf.get(SCORES) is True:
        head = label_head(Keys(hf), (HeadLayer("score", config.hidden_size, 1, has_bias=False),), "last")
        config = replace(config, head=head, tied_embeddings=True)  # no memory goes into an output head
    bos = hf.get("bos_token_id")
    return replace(
        config,
        eos_token_ids=_eos_token_ids(config.vocab_size, generation or {}, hf),
        bos_token_id=None if bos is None else Keys(hf).integer("bos_token_id", config.vocab_size - 1, low=0),
        stored=_with_kv_scales(None if form is None else form.quantization(), kv_scale_dtype(hf)),
    )


def _with_kv_scales(stored: CheckpointQuantization | None, dtype: KVScaleDtype | None) -> CheckpointQuantization | None:
    """Return the quantisation of a checkpoint that has scales of the KV cache for numbers of this type; None: it has none."""
    if dtype is None:
        return stored
    return replace(stored or CheckpointQuantization(NO_QUANTIZATION), kv_scales=dtype)


def decoder_of(checkpoint: Checkpoint) -> DecoderConfig:
    """Read the decoder config of `checkpoint`; raise CheckpointError naming its path.

    Only headers are read, and of a tied output head that is stored nevertheless the numbers, in each call (`has_own_head`).
    """
    config = _named(checkpoint.path, checkpoint.config, checkpoint.generation_config)
    config = replace(config, tied_embeddings=config.tied_embeddings and not has_own_head(checkpoint))
    form, stored = read_form(checkpoint.config), None
    if form is not None:
        stored = form.quantization(checkpoint.tensors)
    elif kinds := stored_kinds(checkpoint.tensors):
        stored = CheckpointQuantization(NO_QUANTIZATION, stored_kinds=kinds)
    return replace(config, stored=_with_kv_scales(stored, kv_scale_dtype(checkpoint.config, checkpoint.tensors)))


def with_vision(config: DecoderConfig, path: Path, hf: Mapping[str, Any], mmproj: Path | None = None) -> DecoderConfig:
    """Return `config` with the tower of the checkpoint at `path`, whose text model's config is `hf`; unchanged if the model
    has none.

    mmproj: the GGUF file with the image encoder of a GGUF text model. Raises CheckpointError for a tower or a preprocessing that is not supported.
    """
    if "vision_config" not in hf.get(MULTIMODAL, {}):
        return config
    family = family_of(hf)
    if family.read_vision is None:
        raise CheckpointError(f"{path}: images of {family.architectures[0]} models are not supported")
    processor = read_image_processor(path, mmproj)
    if processor is None:
        raise CheckpointError(f"{path}: neither {' nor '.join(FILES)} says how images are prepared")
    try:
        return replace(config, vision=family.read_vision(hf, processor, config))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def model_of(checkpoint: Checkpoint) -> DecoderConfig | EncoderConfig:
    """Read the decoder or encoder config of `checkpoint`, as `decoder_of` does for a decoder; raise CheckpointError naming its path."""
    read = encoder_architectures().get(architecture(checkpoint.config) or "")
    if read is None:
        return decoder_of(checkpoint)
    try:
        return read(dict(checkpoint.config))
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error


def unread_keys(checkpoint: Checkpoint, overrides: Mapping[str, Any], original: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of overrides that nothing reads, by `nearest.unread_overrides`. original: `config.json` without overrides."""
    config = checkpoint.config
    read = encoder_architectures().get(architecture(config) or "") or family_of(config).decoder_config
    return unread_overrides(overrides, original, config, read)


def read_decoder(path: Path, mmproj: Path | None = None) -> tuple[DecoderConfig, Checkpoint | None]:
    """Return the decoder config at `path`, without a tower, and its checkpoint, reading what `decoder_of` reads.

    mmproj: the GGUF file with the image encoder of a GGUF text model, which the checkpoint then has, too. The checkpoint is None for a directory with only config.json. Raises CheckpointError in one line.
    """
    config, generation = path / "config.json", path / "generation_config.json"
    if mmproj is not None or not config.is_file() or any(path.glob("*.safetensors")) or is_orbax(path):
        checkpoint = open_model(path, mmproj)
        return decoder_of(checkpoint), checkpoint
    return _named(path, text_model(path, None), read_object(generation) if generation.is_file() else {}), None


def read_mtp_layer(path: Path) -> tuple[DecoderConfig, Checkpoint | None]:
    """Return the first multi-token-prediction layer of the decoder at `path` as a decoder of one layer, and its checkpoint,
    reading what `decoder_of` reads.

    The checkpoint is None for a directory with only config.json. Raises CheckpointError in one line, also for a model
    without such a layer.
    """
    config = path / "config.json"
    if not config.is_file() or is_converted(path) or is_orbax(path):
        raise CheckpointError(
            f"{path}: multi-token-prediction layers are read from Hugging Face directories only, not from GGUF files, conversions "
            "or MaxText checkpoints"
        )
    checkpoint = open_mtp_layer(path, families()) if any(path.glob("*.safetensors")) else None
    try:
        own, mtp = mtp_config(text_model(path, None), families())
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    layer = _named(path, own, {}) if checkpoint is None else decoder_of(checkpoint)
    return replace(layer, mtp=mtp, hyper=None), checkpoint  # it has one residual stream (GLM-5.3-Flash, Hy4)


def read_drafter(path: Path) -> tuple[DecoderConfig, Checkpoint]:
    """Return the drafter at `path`, which has a `drafter_form`, as a decoder with its layers, and its checkpoint, reading what
    `decoder_of` reads. Raises CheckpointError in one line."""
    form = drafter_form(path)
    assert form is not None, "a drafter that is no model"
    checkpoint = open_drafter(path, form, families())
    return _with_inputs(decoder_of(checkpoint), form.read(read_config(path))[1]), checkpoint


def _with_inputs(decoder: DecoderConfig, inputs: DrafterInputs) -> DecoderConfig:
    """Return the layers of a drafter with what it reads of its model."""
    if isinstance(inputs, EagleConfig):
        return replace(decoder, eagle=inputs)
    if isinstance(inputs, DFlashConfig):
        return replace(decoder, dflash=inputs)
    return replace(decoder, assistant=inputs, logit_softcap=None)


def read_draft(path: Path) -> DecoderConfig:
    """Return the config of the draft model at `path`, or of a drafter that is no model, which needs no weights. Raises CheckpointError
    in one line."""
    form = drafter_form(path)
    if form is None:
        return read_decoder(path)[0]
    if any(path.glob("*.safetensors")):
        return read_drafter(path)[0]
    try:
        own, inputs = form.read(read_config(path))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return _with_inputs(_named(path, own, {}), inputs)


def read_model_config(path: Path) -> tuple[DecoderConfig | EncoderConfig, Checkpoint | None]:
    """Return the config of a decoder or an encoder, as `read_decoder` does for a decoder. Raises CheckpointError in one line."""
    config = path / "config.json"
    read = encoder_architectures().get(architecture(read_object(config)) or "") if config.is_file() else None
    if read is None:
        return read_decoder(path)
    if any(path.glob("*.safetensors")):
        checkpoint = open_model(path)
        return model_of(checkpoint), checkpoint
    try:
        return read(read_object(config)), None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def text_model(path: Path, checkpoint: Checkpoint | None) -> Mapping[str, Any]:
    """Return the text model's config of a checkpoint, or of a directory with only config.json.

    If the whole config and its text part contradict each other about a tied output head, which only weights could decide, the
    family's default counts in the second case.
    """
    if checkpoint is not None:
        return checkpoint.config
    whole = read_config(path)
    text = text_config(whole, families())
    return {key: value for key, value in text.items() if key != TIED} if is_tied_in_part(whole) else text


def only_embeds(hf: Mapping[str, Any]) -> bool:
    """Return True if this `config.json` of a text model is that of an encoder, or of a decoder that generates nothing."""
    name = architecture(hf)
    if name in encoder_architectures():
        return True
    with contextlib.suppress(CheckpointError):  # reported when the config is read for its model
        family = family_of(hf)
        return family.only_embeds or hf.get(SCORES) is True or family.decoder_config(dict(hf)).is_bidirectional
    return False


def _named(path: Path, hf: Mapping[str, Any], generation: Mapping[str, Any]) -> DecoderConfig:
    try:
        return decoder_config(hf, generation)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def family_of(hf: Mapping[str, Any]) -> Family:
    """Return the family of decoders that serves this `config.json`. Raises CheckpointError for an unknown architecture."""
    name = architecture(hf)
    known = architectures()
    supported = ", ".join(sorted({*known, *encoder_architectures()}))
    if name is None:
        raise Keys(hf).error("architectures", f"a list whose first entry is one of {supported}")
    if name in encoder_architectures():
        raise CheckpointError(f"model config: {name} is an encoder, which can be served, but is no decoder")
    if name not in known:
        raise CheckpointError(
            f"model config: the architecture {name[:80]!r} is not supported ({_nearest(name, hf)}); supported: {supported}"
        )
    return known[name]


def _nearest(name: str, hf: Mapping[str, Any]) -> str:
    """Return the nearest family of an architecture that is not served, and what of the config it cannot take."""
    known, features = _MISSING.get(name, (None, ""))
    family = nearest_family(name, hf, families()) if known is None else architectures()[known]
    parts = (f"nearest: {family.architectures[0]}", features and f"missing: {features}", str(differences(hf, family)))
    return "; ".join(filter(None, parts))


def _eos_token_ids(vocab_size: int, *sources: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the union in order: chat checkpoints often name the end of a turn in only one of the two files.

    An id that the model cannot generate, as fine-tunes of larger vocabularies name it, ends nothing.
    """
    found: dict[int, None] = {}
    for source in sources:
        value = source.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [] if value is None else [value]:
            found[Keys({"eos_token_id": token_id}).integer("eos_token_id", _MAX_TOKEN_ID, low=-1)] = None
    return tuple(token_id for token_id in found if 0 <= token_id < vocab_size)
