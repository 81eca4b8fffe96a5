"""Settings of inputs that are not text: images, and embeddings of prompts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from jaxserve.config.option import option
from jaxserve.errors import ConfigError

DEFAULT_MAX_IMAGES: Final = 16
"""Most images of a prompt unless the settings say otherwise."""
DEFAULT_MAX_VIDEOS: Final = 1
"""Most videos of a prompt unless the settings say otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagesConfig:
    """Image input of models that read images, and embeddings of prompts. Everything that a client controls has a limit."""

    limit_mm_per_prompt: str | None = option(
        None,
        help='most images and videos of one prompt, as `image=N,video=M` or `{"image": N, "video": M}`; image=0: serve text only, without '
        "the model's image encoder (default: image=16,video=1 of what the model reads)",
    )
    mmproj: str | None = option(
        None,
        help="GGUF file of the image encoder and projector of a GGUF text model, as llama.cpp's `--mmproj`: a path, or "
        "owner/name:FILE.gguf on the hub (default: none, GGUF models read texts only)",
    )
    allowed_media_domains: str | None = option(
        None,
        help="hosts that images may be fetched from over HTTP and HTTPS, comma separated; host:port for a port other than "
        "the scheme's; a host that resolves to a private address is refused unless it is listed as that address (default: "
        "none, only `data:` URLs)",
    )
    max_image_size: int = option(20 << 20, ge=1024, unit="bytes", help="largest image file; larger ones get 400")
    max_image_pixels: int = option(
        32 << 20, ge=1, le=1 << 28, help="most pixels of one image, before it is resized; more get 400"
    )
    max_image_patches: int | None = option(
        None,
        ge=1,
        le=1 << 18,
        help="most patches of one image, and of one encoder call; larger images are reduced (default: those of "
        "one tile, or of Gemma 4's budget, and 4 of them on accelerators; for models that take any size 4096 on CPUs and 16384 on "
        "accelerators)",
    )
    max_encode_patches: int | None = option(
        None,
        ge=1,
        le=1 << 18,
        help="most patches of one encoder call while replies are generated; an image with more is encoded alone "
        "(default: 1024 on CPUs, 4096 on accelerators; at most those of one encoder call)",
    )
    image_step_tokens: int | None = option(
        None,
        ge=1,
        le=1 << 16,
        help="work for images in a step while replies are generated, for each request that waits for it, in tokens of a prompt: the encoder "
        "multiplies as often before the step as that takes, and chunks of prompts with images have so many tokens (default: 10 on CPUs, "
        "128 on accelerators; of all requests at most --max-num-batched-tokens)",
    )
    image_cache_memory: int | None = option(
        None,
        ge=1,
        unit="bytes",
        help="memory on each device for embeddings of images and of prompts (default: 64MiB on CPUs, 256MiB on accelerators)",
    )
    image_fetch_timeout: float = option(10.0, ge=0.1, help="seconds in which an image must be fetched")
    image_decode_timeout: float = option(
        10.0,
        ge=0.1,
        le=120,
        help="processor seconds that decoding and resizing one image may take, in a separate process",
    )
    image_decode_memory: int = option(
        2 << 30, ge=64 << 20, unit="bytes", help="address space that decoding and resizing one image may use"
    )
    max_image_memory: int = option(
        1 << 30,
        ge=1 << 20,
        unit="bytes",
        help="bytes of the prepared images and of the `prompt_embeds` of all requests that an API process serves; beyond, "
        "requests get 429",
    )
    enable_prompt_embeds: bool = option(
        False,
        help="take embeddings in place of a prompt's tokens: `prompt_embeds` of /v1/completions and of LLM.generate",
    )

    def __post_init__(self) -> None:
        if not self.max_images and self.asks_for_videos:
            raise ConfigError(
                f"--limit-mm-per-prompt {self.limit_mm_per_prompt}: image=0 serves text only, without videos; use image=1 or more"
            )

    @property
    def max_images(self) -> int:
        """The number of images that one prompt may have."""
        return _limits(self.limit_mm_per_prompt)["image"]

    @property
    def max_videos(self) -> int:
        """The number of videos that one prompt may have."""
        return _limits(self.limit_mm_per_prompt)["video"]

    @property
    def asks_for_videos(self) -> bool:
        """True if a model whose videos cannot be served does not start."""
        return "video" in (self.limit_mm_per_prompt or "") and self.max_videos > 0

    @property
    def asks_for_images(self) -> bool:
        """True if a model whose images cannot be served does not start."""
        return self.limit_mm_per_prompt is not None or self.mmproj is not None

    @property
    def domains(self) -> frozenset[str]:
        """Hosts, and hosts with ports, that images may be fetched from."""
        return frozenset(
            domain for part in (self.allowed_media_domains or "").split(",") if (domain := part.strip().lower())
        )


def _limits(setting: str | None) -> dict[str, int]:
    """Return the numbers of images and videos that `limit_mm_per_prompt` allows. Raises ConfigError."""
    found = {"image": DEFAULT_MAX_IMAGES, "video": DEFAULT_MAX_VIDEOS}
    if setting is None:
        return found
    text = setting.strip()
    try:
        if text.startswith("{"):
            limits = json.loads(text)
        else:
            limits = dict(part.strip().split("=") for part in text.split(",") if part.strip())
        given = {name: int(count) for name, count in limits.items()}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        given = {"": -1}
    if min(given.values(), default=0) < 0 or given.keys() - found.keys():
        raise ConfigError(
            f'--limit-mm-per-prompt {text!r}: expected image=N,video=M or {{"image": N, "video": M}}, with numbers of at least 0'
        )
    return found | given
