"""An engine of a tiny model that reads images, and the prompts of its golden as the API process sends them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL.Image import Image

from jaxserve.checkpoint.image_processor import read_image_processor
from jaxserve.frontend.images.loader import LoadedImages
from jaxserve.frontend.images.prepared import prepared_item
from jaxserve.frontend.images.processor import process_image
from jaxserve.frontend.images.prompt import prompt_images
from jaxserve.frontend.images.protocol import PreparedImage
from jaxserve.ipc.messages import AddRequest
from jaxserve.model_config.preprocessing.images import ImageProcessorConfig
from tests.engine.model_engine import ModelEngine, request
from tests.models.goldens import DATA
from tests.models.pictures import picture

SIZES = ((80, 50), (30, 45), (20, 22))
ORDER = {1: (0,), 3: (2, 0, 1)}
"""Pictures of the goldens' prompts, by their number."""
IN_ENGINES = (
    "smolvlm_tiny",
    "qwen3_vl_tiny",
    "qwen2_5_vl_tiny",
    "qwen2_5_omni_tiny",
    "mistral3_vision_tiny",
    "pixtral_odd_tiny",
    "llava_tiny",
    "llava_next_tiny",
    "llava_onevision_tiny",
    "ovis2_tiny",
    "cohere2_vision_tiny",
    "lfm2_vl_tiny",
    "lfm3_vl_tiny",
    "llama4_vision_tiny",
    "qwen3_5_moe_vision_odd_tiny",
    "gemma3_vision_tiny",
    "gemma4_vision_tiny",
    "gemma4_vision_odd_tiny",
    "gemma4_unified_vision_tiny",
    "kimi_k25_tiny",
)
"""Models that an engine runs without a server."""


def limits(name: str) -> dict[str, int]:
    """Return the limits of a tiny model that reads images. With equal limits a server has the programs of an engine.

    An image of Gemma 4 has up to 70 tokens, and one step holds it beside a token of every other request.
    """
    sizes = (320, 73) if name.startswith("gemma4") else (256, 160) if name.startswith("paligemma") else (256, 16)
    return {**dict(zip(("max_model_len", "max_num_batched_tokens"), sizes, strict=True)), "max_num_seqs": 4}


@dataclass
class Reader:
    """An engine and the prompts of its golden."""

    engine: ModelEngine
    name: str

    @property
    def path(self) -> Path:
        return DATA / "vision" / self.name

    @property
    def golden(self) -> dict[str, np.ndarray]:
        with np.load(DATA / "vision" / self.name / "golden.npz") as arrays:
            return dict(arrays)

    @property
    def processor(self) -> ImageProcessorConfig:
        config = read_image_processor(DATA / "vision" / self.name)
        assert config is not None
        return config

    def request(self, name: str, count: int, *, changed: bool = False, **sampling: Any) -> AddRequest:
        """Return the golden's prompt with `count` pictures, as the API process sends it."""
        images = [picture(*SIZES[index], index) for index in ORDER[count]]
        if changed:
            for image in images:
                image.putpixel((5, 5), (1, 2, 3))
        return self.request_of(name, self.golden[f"ids_{count}"].tolist(), images, self.processor, **sampling)

    def request_of(
        self, name: str, prompt: list[int], images: list[Image], processor: ImageProcessorConfig, **sampling: Any
    ) -> AddRequest:
        """Return a request with a prompt of these token ids and images, as the API process sends it."""
        info = self.engine.executor.model_info.images
        assert info is not None
        prepared = []
        for image in images:
            processed = process_image(image, processor, is_alone=len(images) == 1)
            prepared.append(PreparedImage(list(map(prepared_item, processed.items)), processed.text))
        loaded = LoadedImages(
            tuple(prepared), image_token_id=processor.image_token_id, mark_token_ids=processor.mark_token_ids
        )
        placed, rope = prompt_images(prompt, loaded, info, "messages")
        return msgspec.structs.replace(request(name, prompt, **sampling), images=placed, rope_positions=rope)

    def expected(self, count: int) -> list[int]:
        return self.golden[f"outputs_{count}"].tolist()  # type: ignore[no-any-return]
