"""Properties of image input, as the engine tells them."""

from __future__ import annotations

import msgspec


class ImageInfo(msgspec.Struct, frozen=True, array_like=True):
    """Properties of a model that reads images."""

    max_patches: int
    """Patches of one encoder input."""
    max_tokens: int
    """Tokens of one encoder input."""
    cache_rows: int
    """Embeddings that the device keeps."""
    merge: int
    """Patches of the side of a block that becomes one token."""
    patch_bytes: int
    """Bytes of a patch of an image."""
    has_rope_positions: bool = False
    """True if each token has three rotary positions."""
    step_patches: int | None = None
    """Patches that are encoded before a step while replies are generated; None: `max_patches`."""
    is_bidirectional: bool = False
    """True if the tokens of an image attend to each other in both directions."""
    step_tokens: int | None = None
    """Tokens of chunks with images in a step while replies are generated, for each request that waits for images; None: any number."""
    encoder_parts: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Numbers of patches, the smallest first, and where each part of an encoder call with up to as many ends, in calls of the encoder's
    programs; none: every call has one part."""
    has_class_token: bool = False
    """True if the place of a class token precedes the patches of each encoder input."""
    whole_prompt_tokens: int = 0
    """Most tokens of a prompt whose tokens all attend to each other; 0: they attend to earlier ones, but for `is_bidirectional`."""
    num_sources: int = 0
    """Numbers that say which outputs of the connector make an embedding: see `VisionConfig.num_sources`."""
    reads_videos: bool = False
    """True if prompts may have videos."""
    num_frames: int = 1
    """Frames of a video that a patch shows, with as many times the bytes."""
    tile_patches: int = 0
    """Patches of each tile of an encoder input, with a class token, if `num_sources` is not 0; 0: there are no tiles."""
