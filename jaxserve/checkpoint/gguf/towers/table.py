"""Image encoders and projectors of mmproj files (llama.cpp), by `clip.projector_type`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from jaxserve.checkpoint.gguf.towers.gemma4 import GEMMA4
from jaxserve.checkpoint.gguf.towers.llava import LLAVA
from jaxserve.checkpoint.gguf.towers.pixtral import LIGHTON_OCR, PIXTRAL
from jaxserve.checkpoint.gguf.towers.projector import Projector
from jaxserve.checkpoint.gguf.towers.qwen import QWEN2_5_VL, QWEN2_VL, QWEN3_VL
from jaxserve.checkpoint.gguf.towers.siglip import GEMMA3, IDEFICS3, INTERNVL

PROJECTORS: Final[Mapping[str, Projector]] = {
    projector.kind: projector
    for projector in (GEMMA3, QWEN2_5_VL, QWEN2_VL, QWEN3_VL, IDEFICS3, PIXTRAL, INTERNVL, GEMMA4, LLAVA, LIGHTON_OCR)
}
