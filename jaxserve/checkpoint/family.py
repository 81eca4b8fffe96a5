"""The declaration in each file of `models/families/`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture
from jaxserve.checkpoint.maxtext.layout import MaxTextLayout
from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.checkpoint.qkv import QKVRows
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.preprocessing.images import ImageProcessorConfig
from jaxserve.model_config.vision import VisionConfig

StackedExperts = Literal["interleaved", "halves", "halves_by_inputs", "halves_of_either_order", "rows_by_width"]
"""interleaved: a gate's output, then an up's, and inputs by outputs (gpt-oss). halves: all outputs of the gate, then those
of up, and outputs by inputs (Qwen3.5). halves_by_inputs: the same, inputs by outputs (Llama 4). halves_of_either_order: as
halves, but matrices whose shape says so are inputs by outputs (Qwen3-VL as published). rows_by_width: gate, up and down apart, each
with the F rows of one expert after those of another, whose axis is the experts' width (DBRX)."""
MTPForm = Literal["layer", "module", "mimo", "mimo_v2", "ernie", "step", "hy_v4", "minimax_m3"]
"""Form of a multi-token-prediction layer: its names in checkpoints, and what it reads. See `checkpoint.drafters.mtp`."""
ReadVision = Callable[[Mapping[str, Any], ImageProcessorConfig, DecoderConfig], VisionConfig]
"""Read the tower from the text model's config, which holds the whole one (`renamed.MULTIMODAL`), the preprocessing, and the
decoder. Raises CheckpointError for a value that is not computed."""


@dataclass(frozen=True, slots=True)
class Family:
    """One family of decoders: the classes in `config.json` it serves, and how its checkpoints are read."""

    architectures: tuple[str, ...]
    """Values of `architectures` in `config.json`; a GGUF file of the family counts as the first."""
    decoder_config: Callable[[dict[str, Any]], DecoderConfig]
    """Read `config.json`; raises CheckpointError for a value that is not computed."""
    text_part_of: tuple[str, ...] = ()
    """Multimodal architectures whose `text_config` describes the family's first architecture."""
    read_vision: ReadVision | None = None
    """Read the tower of a multimodal config; None: images are not served."""
    text_model_types: tuple[str | None, ...] = ()
    """Values of `model_type` that a `text_config` may have, None: it may have none; empty: any."""
    renames: Mapping[str, str] = field(default_factory=dict)
    """Our name by the checkpoint's, for components of tensor names (`mlp` in `model.layers.0.mlp.gate.weight`), or for
    several in a row (`mlp.gate`)."""
    config_renames: Callable[[Mapping[str, Any]], Mapping[str, str]] = lambda config: {}
    """Return further renames, which depend on `config.json`."""
    key_names: Mapping[str, str] = field(default_factory=dict)
    """Our name by the family's, for keys of `config.json`; its files may have either."""
    shapes: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: config
    """Return a config of our names with `num_key_value_heads`, if other keys say how many there are."""
    qkv_rows: QKVRows = QKVRows()
    """Order of the rows of matrices that hold queries, keys and values (`qkv_proj`)."""
    transposed: tuple[str, ...] = ()
    """Names of our modules, the last components, whose matrices are stored inputs by outputs (GPT-2)."""
    unused_tensors: tuple[str, ...] = ()
    """Ends of the names of tensors that are not read, such as causal masks, under the names that checkpoints have."""
    config_unused: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda config: ()
    """Return further ends of names of tensors that are not read, which depend on `config.json`."""
    check_tensors: Callable[[Checkpoint], None] = lambda checkpoint: None
    """Raise CheckpointError if a tensor that is not read contradicts the config; names are those that checkpoints have."""
    has_optional_corrections: bool = False
    """True if checkpoints without correction biases of routers have zeros instead of them (A.X-K1)."""
    stacked_experts: StackedExperts | None = None
    """Layout of checkpoints that store all experts of a layer in one tensor; None: there are none."""
    only_embeds: bool = False
    """True if no model of the family generates."""
    gguf: GGUFArchitecture | None = None
    """None: GGUF files of the family are not read."""
    maxtext: MaxTextLayout | None = None
    """None: MaxText checkpoints of the family are not read."""
    mtp: MTPForm | None = None
    """Form of the multi-token-prediction layer that checkpoints may carry and that is served; None: none is."""
    mtp_keys: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: {}
    """Return the keys of `config.json` that differ for that layer, as a decoder of one layer."""
