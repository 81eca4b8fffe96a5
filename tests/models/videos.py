"""A small video, the preprocessing of the tests' models for it, and files that hold it."""

from __future__ import annotations

import io
import json
import shutil
import struct
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from tests.models.goldens import DATA
from tests.models.pictures import picture

VIDEOS: Final = (
    "qwen3_vl_tiny",
    "qwen3_5_moe_vision_odd_tiny",
    "gemma4_vision_odd_tiny",
    "gemma4_vision_tiny",
    "qwen2_vl_tiny",
    "qwen2_5_vl_tiny",
    "qwen2_5_vl_odd_tiny",
    "glm4v_tiny",
    "glm4v_moe_odd_tiny",
    "internvl_tiny",
    "internvl_odd_tiny",
)
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
PLAIN: Final[dict[str, Any]] = PROCESSOR | {
    "video_processor_type": "Qwen2VLVideoProcessor",
    "size": {"shortest_edge": 1024, "longest_edge": 3000},
    "fps": 2.0,
    "do_sample_frames": True,
    "cap_pixels_per_frame": True,
    "max_video_tokens": 40,
}
"""The preprocessing of Qwen2-VL and Qwen2.5-VL. The bound of all frames is below that of each frame times their number."""
GLM: Final[dict[str, Any]] = PROCESSOR | {"video_processor_type": "Glm4vVideoProcessor"}
"""The preprocessing of GLM-4.1V; that of GLM-4.6V, with experts here, takes other frames and writes other times."""
INTERNVL: Final[dict[str, Any]] = {
    "video_processor_type": "InternVLVideoProcessor",
    "num_frames": 4,
    "do_sample_frames": True,
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
    if name.startswith("internvl"):
        images = json.loads((DATA / "vision" / name / "preprocessor_config.json").read_text())
        return INTERNVL | {"size": images["size"]}
    if name.startswith("glm4v"):
        dynamic = {"video_processor_type": "Glm46VVideoProcessor"} if "moe" in name else {}
        return GLM | dynamic | {"patch_size": vision["patch_size"], "merge_size": vision["spatial_merge_size"]}
    own = PLAIN if name.startswith(("qwen2_vl", "qwen2_5_vl")) else PROCESSOR
    return own | {"patch_size": vision["patch_size"], "merge_size": vision["spatial_merge_size"]}


def with_videos(folder: Path, name: str, **changes: Any) -> Path:
    """Return a copy of a tiny checkpoint in `folder` that also reads videos. changes: of its preprocessing of videos."""
    placeholders = {"gemma": "<|video|>", "glm4v": "<|video|>", "inter": "<video>"}
    made, placeholder = folder / name, placeholders.get(name[:5], QWEN)
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


def video_file(kind: str = "matroska", frames: list[Any] | None = None, rate: float | Fraction = RATE) -> bytes:
    """Return a file of this kind with the frames, without loss but for `mp4`."""
    import av

    target = io.BytesIO()
    with av.open(target, "w", format=kind) as container:
        stream = container.add_stream("mpeg4" if kind == "mp4" else "ffv1", rate=Fraction(rate))
        first = (FRAMES if frames is None else frames)[0]
        stream.width, stream.height = first.size
        stream.pix_fmt = "yuv420p" if kind == "mp4" else "bgr0"
        for frame in FRAMES if frames is None else frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(frame), format="rgb24")))
        container.mux(stream.encode())
    return target.getvalue()


def written(
    kind: str,
    frames: list[Image.Image] | None = None,
    *,
    rate: int = 10,
    times: list[int] | None = None,
    num_hidden: int = 0,
    title: str = "",
) -> bytes:
    """Return a file of this kind with frames of one shade each, as programs write them.

    times: of the frames, in milliseconds, in a file that says no rate. num_hidden: frames at the beginning that an edit list hides.
    """
    import av

    target, size = io.BytesIO(), (64, 48) if frames is None else frames[0].size
    count = len(FRAMES) if times is None else len(times)
    own = [Image.new("RGB", size, (number * 4,) * 3) for number in range(count)] if frames is None else frames
    codec = {"webm": "libvpx", "mp4": "libx264", "avi": "mpeg4"}[kind]
    with av.open(target, "w", format=kind, options={"live": "1"} if times is not None else {}) as container:
        if title:
            container.metadata["title"] = title
        stream = container.add_stream(codec, rate=None if times is not None else rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
            stream.codec_context.framerate = Fraction(0, 1)
        packets = []
        for number, image in enumerate(own):
            frame = av.VideoFrame.from_ndarray(np.asarray(image), format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[number], Fraction(1, 1000)
            packets += stream.encode(frame)
        packets += stream.encode()
        for packet in packets:
            if num_hidden:
                shift = int(num_hidden / rate / packet.time_base)
                packet.pts, packet.dts = packet.pts - shift, packet.dts - shift
            container.mux(packet)
    return target.getvalue()


def turned(file: bytes, degrees: int) -> bytes:
    """Return an MP4 file whose frames are to be shown turned clockwise."""
    matrix = {0: (1, 0, 0, 1), 90: (0, 1, -1, 0), 180: (-1, 0, 0, -1), 270: (0, -1, 1, 0)}[degrees]
    a, b, c, d = (number << 16 for number in matrix)
    at = file.index(b"tkhd") + 44  # ISO/IEC 14496-12, 8.3.2
    return file[:at] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + file[at + 36 :]
