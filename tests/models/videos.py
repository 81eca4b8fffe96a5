"""A small video, the preprocessing of the tests' models for it, and files that hold it."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.models.goldens import DATA
from tests.models.pictures import picture

VIDEOS: Final = ("qwen3_vl_tiny", "qwen3_5_moe_vision_odd_tiny", "gemma4_vision_odd_tiny", "gemma4_vision_tiny")
"""Tiny checkpoints of tests/models/data/vision with a golden of a video in tests/models/data/video."""
RATE: Final = 3.0
"""Frames of the video in a second."""
FRAMES: Final = [picture(70, 44, number) for number in range(11)]
PROCESSOR: Final[dict[str, Any]] = {
    "video_processor_type": "Qwen3VLVideoProcessor",
    "size": {"shortest_edge": 512, "longest_edge": 20_000},
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.4, 0.5],
    "image_std": [0.5, 0.5, 0.25],
}
GEMMA: Final[dict[str, Any]] = {"video_processor_type": "Gemma4VideoProcessor", "num_frames": 2, "max_soft_tokens": 70}
QWEN: Final = "<|vision_start|><|video_pad|><|vision_end|>"
PROMPT: Final = "<|im_start|>user\nSee {} here<|im_end|>\n<|im_start|>assistant\n"


def preprocessing(name: str) -> dict[str, Any]:
    """Return the preprocessing of videos of a tiny checkpoint."""
    vision = json.loads((DATA / "vision" / name / "config.json").read_text())["vision_config"]
    if name.startswith("gemma"):
        return GEMMA | {"patch_size": vision["patch_size"], "pooling_kernel_size": vision["pooling_kernel_size"]}
    return PROCESSOR | {"patch_size": vision["patch_size"], "merge_size": vision["spatial_merge_size"]}


def with_videos(folder: Path, name: str, **changes: Any) -> Path:
    """Return a copy of a tiny checkpoint in `folder` that also reads videos. changes: of its preprocessing of videos."""
    made, placeholder = folder / name, "<|video|>" if name.startswith("gemma") else QWEN
    shutil.copytree(DATA / "vision" / name, made)
    values = preprocessing(name) | changes
    if name.startswith("gemma"):  # where Gemma 4 has it
        own = json.loads((made / "preprocessor_config.json").read_text())
        joint = {"image_processor": own, "video_processor": values}
        (made / "processor_config.json").write_text(json.dumps(joint))
    else:
        (made / "video_preprocessor_config.json").write_text(json.dumps(values))
    path = made / "tokenizer_config.json"
    tokens = json.loads(path.read_text())
    image = "{% elif part['type'] == 'text' %}"
    video = "{% elif part['type'] == 'video' %}{{ '" + placeholder + "' }}"
    assert tokens["chat_template"].count(image) == 1, "the template of make_vision_goldens.py"
    tokens["chat_template"] = tokens["chat_template"].replace(image, video + image)
    path.write_text(json.dumps(tokens))
    return made


def video_file(kind: str = "matroska", frames: list[Any] | None = None, rate: float = RATE) -> bytes:
    """Return a file of this kind with the frames, without loss but for `mp4`."""
    import av

    target = io.BytesIO()
    with av.open(target, "w", format=kind) as container:
        stream = container.add_stream("mpeg4" if kind == "mp4" else "ffv1", rate=int(rate))
        first = (FRAMES if frames is None else frames)[0]
        stream.width, stream.height = first.size
        stream.pix_fmt = "yuv420p" if kind == "mp4" else "bgr0"
        for frame in FRAMES if frames is None else frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(frame), format="rgb24")))
        container.mux(stream.encode())
    return target.getvalue()
