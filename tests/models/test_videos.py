"""Models that read videos against transformers, on tiny checkpoints in float32: frames, pixels, features, logits and tokens."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxserve.checkpoint.image_processor import read_image_processor
from jaxserve.checkpoint.preprocessing.videos import read_video_processor
from jaxserve.config import ImagesConfig
from jaxserve.errors import CheckpointError, ConfigError, InvalidRequestError
from jaxserve.frontend.images.decode import ImageError
from jaxserve.frontend.images.loader import LoadedImages
from jaxserve.frontend.images.positions import ImageSpan, image_spans, mrope_positions
from jaxserve.frontend.images.processor import EncoderItem, ProcessedImage
from jaxserve.frontend.images.prompt import prompt_images
from jaxserve.frontend.images.videos.decode import Video, VideoReader, decode_video
from jaxserve.frontend.images.videos.frames import chosen_frames
from jaxserve.frontend.images.videos.items import load_video_preparer, process_video, video_reader
from jaxserve.ipc.image_info import ImageInfo
from jaxserve.ipc.prompt_images import RopePositions
from jaxserve.model_config.preprocessing.videos import FrameArea, TimePositions, VideoProcessorConfig
from jaxserve.models.registry import read_decoder
from jaxserve.runner.images.encoder import block_tokens
from jaxserve.runner.images.served import with_served_images
from jaxserve.tokenizer.tokenizer import load_tokenizer
from tests.models.goldens import DATA
from tests.models.videos import FRAMES, PROMPT, RATE, VIDEOS, turned, video_file, with_videos, written
from tests.models.vision_model import VisionModel

pytest.importorskip("av")

MAX_PIXELS = 1 << 20
MAX_PATCHES = 1024
FURTHER = ("qwen2_5_vl_odd_tiny", "glm4v_tiny", "internvl_tiny")
"""Checkpoints whose preprocessing and tower another one has as well."""


@cache
def golden_of(name: str) -> dict[str, np.ndarray]:
    with np.load(DATA / "video" / f"{name}.npz", allow_pickle=False) as arrays:
        return dict(arrays)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.exhaustive if name in FURTHER else ()) for name in VIDEOS],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_videos(tmp_path_factory.mktemp("videos"), request.param)


def config_of(path: Path) -> VideoProcessorConfig:
    config = read_video_processor(path)
    assert config is not None
    return config


def processed(path: Path, data: bytes | None = None) -> ProcessedImage:
    config = config_of(path)
    file = video_file() if data is None else data
    return process_video(decode_video(file, video_reader(config, MAX_PATCHES), MAX_PIXELS), config)


def read_all(data: bytes, max_pixels: int = MAX_PIXELS) -> Video:
    """Decode every frame as it is."""
    return decode_video(data, VideoReader(lambda count, rate: np.arange(count), lambda image, count: image), max_pixels)


def test_frames_and_pixels_are_those_of_transformers(model: Path) -> None:
    golden, video = golden_of(model.name), processed(model)
    assert chosen_frames(len(FRAMES), RATE, config_of(model).sampling).tolist() == golden["chosen"].tolist()
    pixels = np.concatenate([by_token(item) for item in video.items])
    assert np.abs(pixels.astype(int) - golden["pixels"]).max() <= 1  # torchvision and Pillow round differently
    assert video.num_tokens == len(golden["features"])


def test_prompts_have_the_times_and_tokens_with_which_the_model_was_trained(model: Path) -> None:
    golden, video, markup = golden_of(model.name), processed(model), config_of(model).markup
    parts = [{"type": "text", "text": "See "}, {"type": "video"}, {"type": "text", "text": " here"}]
    ids = load_tokenizer(model).encode_chat(
        [{"role": "user", "content": parts}], placeholders=[markup.placeholder], images=[video.text]
    )
    assert ids == golden["ids"].tolist()
    beginning = {"clock": "00:00 ", "seconds": "<0.3 seconds>", "none": "<|vision_start|>"}
    beginning |= {"number": "Frame1: <img>"}
    assert video.text.startswith(beginning.get(markup.time, "<|begin_of_image|>"))
    assert video.text.endswith({"second_after": ">3", "seconds_after": ">3.3 seconds"}.get(markup.time, markup.end))
    assert PROMPT.count("{}") == 1


def test_positions_of_frames_are_those_of_transformers(model: Path) -> None:
    if "positions" not in golden_of(model.name):
        return  # one position for each token
    golden, video, config = golden_of(model.name), processed(model), config_of(model)
    counts = [item.num_tokens for item in video.items]
    spans = image_spans(golden["ids"], config.token_id, counts)
    grids, times = [item.grid for item in video.items], [item.time for item in video.items]
    positions, delta = mrope_positions(len(golden["ids"]), spans, grids, config.merge, times)
    assert positions.tolist() == golden["positions"].tolist()
    assert delta == golden["delta"]


@pytest.mark.slow
def test_features_logits_and_greedy_tokens_equal_transformers(model: Path) -> None:
    golden, video = golden_of(model.name), processed(model)
    ends = np.cumsum([(item.positions[:, 1] >= 0).sum() for item in video.items])[:-1]
    items = [
        replace(item, patches=as_read(pixels, item))
        for item, pixels in zip(video.items, np.split(golden["pixels"], ends), strict=True)
    ]
    computed = VisionModel(model)
    assert computed.vision.has_videos
    padding = len(items[0].patches) if computed.vision.has_class_token else 4 * computed.vision.block
    rows = computed.encode(items, sum(len(item.patches) for item in items) + padding)
    np.testing.assert_allclose(np.concatenate(rows), golden["features"], atol=1e-4, rtol=0)
    logits, found = computed.run(golden["ids"], items, rows, len(golden["outputs"]))
    np.testing.assert_allclose(logits, golden["logits"], atol=1e-3, rtol=0)
    assert found.tolist() == golden["outputs"].tolist()


def by_token(item: EncoderItem) -> np.ndarray:
    """Return the patches of an item block by block in the order of its tokens."""
    is_patch = item.positions[:, 1] >= 0  # without a class token
    found, positions = item.patches[is_patch], item.positions[is_patch]
    block = len(found) // item.num_tokens
    order = np.argsort(block_tokens(positions, block))
    return found.reshape(item.num_tokens, block, -1)[order].reshape(found.shape)


def as_read(patches: np.ndarray, item: EncoderItem) -> np.ndarray:
    """Return patches, of `by_token`, in the order in which the tower reads those of an item."""
    is_patch, block = item.positions[:, 1] >= 0, len(patches) // item.num_tokens
    order = block_tokens(item.positions[is_patch], block)
    found = np.zeros(item.patches.shape, patches.dtype)
    found[is_patch] = patches.reshape(item.num_tokens, block, -1)[order].reshape(patches.shape)
    return found


@pytest.mark.parametrize(
    ("count", "rate", "changes", "expected"),
    [
        (3, 30.0, {}, [0, 1, 2]),  # no more than there are
        (100, 25.0, {}, [0, 14, 28, 42, 57, 71, 85, 99]),
        (30, 30.0, {}, [0, 10, 19, 29]),  # min_frames
        (100, 1.0, {"max_frames": 5}, [0, 25, 50, 74, 99]),
        (100, 25.0, {"num_frames": 3}, [0, 50, 99]),
        (9, 2.0, {"fps": 1}, [0, 3, 5, 8]),
    ],
)
def test_frames_are_taken_at_even_distances(
    count: int, rate: float, changes: dict[str, Any], expected: list[int], tmp_path: Path
) -> None:
    config = config_of(with_videos(tmp_path, VIDEOS[0], **changes))
    assert chosen_frames(count, rate, config.sampling).tolist() == expected


@pytest.mark.parametrize(
    ("count", "rate", "changes", "expected"),
    [
        (1, 30.0, {}, [0]),
        (3, 30.0, {}, [0, 1]),  # pairs
        (33, 30.0, {}, [0, 8, 16, 24]),  # min_frames
        (100, 25.0, {}, [0, 12, 25, 37, 50, 62, 75, 87]),
        (100, 1.0, {"max_frames": 5}, [0, 25, 50, 75]),
        (100, 25.0, {"num_frames": 7}, [0, 12, 25, 37, 50, 62, 75, 87]),  # rounded to pairs
        (9, 2.0, {"fps": 1}, [0, 2, 4, 6]),
    ],
)
def test_pairs_of_frames_are_taken_as_qwen2_vl_does(
    count: int, rate: float, changes: dict[str, Any], expected: list[int], tmp_path: Path
) -> None:
    if "num_frames" in changes:
        changes = changes | {"fps": None}
    config = config_of(with_videos(tmp_path, "qwen2_5_vl_tiny", **changes))
    assert chosen_frames(count, rate, config.sampling).tolist() == expected


@pytest.mark.parametrize(
    ("count", "changes", "expected"),
    [
        (1, {}, [0]),
        (11, {"num_frames": 4}, [1, 4, 6, 9]),
        (100, {"num_frames": None}, [6, 18, 31, 43, 56, 68, 81, 93]),
        (30, {"num_frames": None, "fps": 1.0}, [5, 15, 25]),  # ten frames a second
    ],
)
def test_internvl_takes_the_middle_of_equal_parts(
    count: int, changes: dict[str, Any], expected: list[int], tmp_path: Path
) -> None:
    config = config_of(with_videos(tmp_path, "internvl_tiny", **changes))
    assert chosen_frames(count, 10.0, config.sampling).tolist() == expected


@pytest.mark.parametrize(
    ("kind", "changes", "count", "rate", "number", "first", "total"),
    [
        ("Glm4v", {}, 1, 30.0, 2, [0, 0], 0),
        ("Glm4v", {}, 50, 25.0, 4, [0, 13, 25, 38], 76),
        ("Glm4v", {}, 61, 7.5, 16, [0, 4, 8, 12, 15, 19], 456),
        ("Glm4v", {}, 700, 2.0, 600, [0, 2, 3, 4, 5, 6], 210_298),  # longer than 300 s
        ("Glm4v", {"fps": 1.0, "max_duration": 8}, 240, 24.0, 8, [0, 35, 69, 103, 138, 172], 962),
        ("Glm46V", {}, 50, 25.0, 12, [0, 5, 9, 13, 17, 21], 280),
        ("Glm46V", {}, 61, 7.5, 48, [0, 2, 3, 4, 5, 7], 1432),
        ("Glm46V", {}, 700, 2.0, 350, [0, 2, 4, 6, 8, 10], 122_150),  # longer than 300 s
        ("Glm46V", {}, 5000, 2.0, 640, [0, 7, 15, 23, 31, 39], 1_599_361),  # longer than 2400 s
        ("Glm46V", {}, 1, 30.0, 2, [0, 0], 0),  # transformers takes none
    ],
)
def test_frames_of_glm_are_those_of_its_processors(
    kind: str,
    changes: dict[str, Any],
    count: int,
    rate: float,
    number: int,
    first: list[int],
    total: int,
    tmp_path: Path,
) -> None:
    kinds = {"video_processor_type": f"{kind}VideoProcessor"}
    config = config_of(with_videos(tmp_path, "glm4v_tiny", **kinds, **changes))
    found = chosen_frames(count, rate, config.sampling)
    assert (len(found), found[:6].tolist(), found.sum()) == (number, first, total)


def test_qwen2_5_vl_as_published_has_the_preprocessing_of_its_images(tmp_path: Path) -> None:
    path = with_videos(tmp_path, "qwen2_5_vl_tiny")
    (path / "video_preprocessor_config.json").unlink()
    file = path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"min_pixels": 3136, "max_pixels": 12_845_056}))
    config, images = config_of(path), read_image_processor(path)
    assert images is not None and config.normalization == images.normalization
    assert (config.patch_size, config.merge, config.group, config.window) == (8, 2, 2, images.window)
    assert config.sizes == FrameArea(128 * 28 * 28, 768 * 28 * 28, 2 * 115_200 * 16 * 16)
    assert (config.sampling.fps, config.sampling.min_frames, config.sampling.max_frames) == (2.0, 4, 768)
    decoder, checkpoint = read_decoder(path)
    found = with_served_images(ImagesConfig(limit_mm_per_prompt="video=1"), decoder, path, checkpoint)
    assert found.vision is not None and found.vision.has_videos


def test_frames_of_qwen2_vl_have_a_share_of_the_tokens_of_all(tmp_path: Path) -> None:
    size = {"shortest_edge": 1024, "longest_edge": 16_384}
    config = config_of(with_videos(tmp_path, "qwen2_vl_tiny", size=size, max_video_tokens=100))
    reduce, large = video_reader(config, MAX_PATCHES).reduce, FRAMES[0].resize((640, 640))
    assert reduce(large, 2).size == (128, 128)
    assert reduce(large, 8).size == (64, 64)  # 90 blocks of 16 x 16 pixels for four pairs
    assert reduce(large, 400).size == (32, 32)  # never less than the fewest of a frame
    assert video_reader(config, 16).reduce(large, 2).size == (32, 32)


@pytest.mark.parametrize("name", ["qwen2_vl_tiny", VIDEOS[0]])
def test_frames_smaller_than_a_model_takes_are_enlarged_to_no_more_than_the_engine_encodes(
    name: str, tmp_path: Path
) -> None:
    """The fewest pixels of a frame are more than the engine encodes: rounding up to them would have it refused."""
    config = config_of(with_videos(tmp_path, name, size={"shortest_edge": 100_352, "longest_edge": 602_112}))
    for most in (20, 64, 300):
        for size in ((21, 17), (64, 40), (100, 100), (23, 150)):
            width, height = video_reader(config, most).reduce(FRAMES[0].resize(size), 4).size
            assert most / 4 <= width * height // 64 <= most


def test_the_seconds_of_a_video_move_its_groups_in_time(tmp_path: Path) -> None:
    """Ten of eleven frames stand for eleven seconds, and a second for four positions; equal frames at other times are other pages."""
    path = with_videos(tmp_path, "qwen2_5_vl_tiny")
    config = config_of(path)
    found = [[item.time for item in processed(path, video_file(rate=rate)).items] for rate in (1.0, RATE)]
    assert config.times == TimePositions(4.0)
    assert found == [[None, 8, 17, 26, 35], [None, 4, 9]]
    prepare = load_video_preparer(path, MAX_PATCHES)
    slow, fast = (prepare(video_file(rate=rate, frames=FRAMES[:4]), MAX_PIXELS) for rate in (1.0, 2.0))
    assert [item.patches for item in slow.items] == [item.patches for item in fast.items]
    assert [one.digest == other.digest for one, other in zip(slow.items, fast.items, strict=True)] == [True, False]


def test_text_goes_on_after_the_last_position_of_a_video() -> None:
    spans = [ImageSpan(1, 2), ImageSpan(3, 2), ImageSpan(6, 2)]
    positions, delta = mrope_positions(9, spans, [(2, 4)] * 3, 2, [None, 5, None])
    assert positions[0].tolist() == [0, 1, 1, 6, 6, 7, 8, 8, 10]
    assert positions[1].tolist() == [0, 1, 1, 1, 1, 7, 8, 8, 10]
    assert positions[2].tolist() == [0, 1, 2, 1, 2, 7, 8, 9, 10]
    assert delta == 2


def test_a_video_that_says_years_is_refused_where_its_times_would_be_positions(tmp_path: Path) -> None:
    """An engine whose step has a position beyond 32 bits ends."""
    path = with_videos(tmp_path, "qwen2_5_vl_tiny")
    token, prepare = config_of(path).token_id, load_video_preparer(path, MAX_PATCHES)
    info = ImageInfo(MAX_PATCHES, MAX_PATCHES, MAX_PATCHES, merge=2, patch_bytes=192, has_rope_positions=True)

    def positions_of(rate: Fraction, count: int) -> RopePositions | None:
        video = prepare(video_file(rate=rate), MAX_PIXELS)
        loaded = LoadedImages((video,) * count, mark_token_ids=(token,))
        prompt = [1, *[token] * sum(item.num_tokens for item in video.items), 1] * count
        return prompt_images(prompt, loaded, info, "messages")[1]

    assert positions_of(Fraction(1, 1 << 23), 1) is not None
    for rate, count in ((Fraction(1, 1 << 29), 1), (Fraction(1, 1 << 23), 12)):
        with pytest.raises(InvalidRequestError, match="'messages': the videos are too long"):
            positions_of(rate, count)


def test_the_last_group_repeats_the_last_frame(tmp_path: Path) -> None:
    config = config_of(with_videos(tmp_path, VIDEOS[0]))
    frames = [video_reader(config, MAX_PATCHES).reduce(frame, 3) for frame in FRAMES[:3]]
    video = process_video(Video(frames, [0.0, 1.0, 2.0]), config)
    assert len(video.items) == 2 and "<2.0 seconds>" in video.text
    last = video.items[1].patches.reshape(len(video.items[1].patches), 3, 2, -1)
    assert np.array_equal(last[:, :, 0], last[:, :, 1])


def test_frames_are_reduced_to_what_the_engine_encodes_and_to_the_bound_of_a_frame(tmp_path: Path) -> None:
    large = FRAMES[0].resize((700, 440))
    capped = config_of(with_videos(tmp_path, VIDEOS[0], cap_pixels_per_frame=True, max_video_tokens=3))
    assert video_reader(capped, MAX_PATCHES).reduce(large, 4).size == (32, 16)  # a frame in its proportions
    size = {"shortest_edge": 512, "longest_edge": 1 << 24}
    whole = config_of(with_videos(tmp_path / "whole", VIDEOS[0], size=size))
    for count in range(1, 12):  # 5 frames are compared with the bounds as 4
        width, height = video_reader(whole, 64).reduce(large, count).size
        assert 48 <= width * height // 64 <= 64


@pytest.mark.parametrize("kind", ["matroska", "avi", "mp4"])
def test_files_of_each_kind_are_read(kind: str) -> None:
    video = read_all(video_file(kind))
    assert len(video.frames) == len(FRAMES)
    assert np.allclose(video.seconds, np.arange(len(FRAMES)) / RATE)
    worst = max(
        np.abs(np.asarray(found, int) - np.asarray(frame, int)).mean()
        for found, frame in zip(video.frames, FRAMES, strict=True)
    )
    assert worst < (40 if kind == "mp4" else 1e-9)  # a lossy codec of noise


def png() -> bytes:
    target = io.BytesIO()
    FRAMES[0].save(target, "PNG")
    return target.getvalue()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no video of a supported format"),
        (png(), "no video of a supported format"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "no video of a supported format"),
        (b"\x00\x00\x00\x18ftypmp42" + b"\x00" * 64, "damaged"),
        (b"\x1a\x45\xdf\xa3" + b"\x07" * 300, "damaged"),
        (b"\x00\x00\x00\x18ftyp#EXTM3U\nfile:///etc/passwd", "damaged"),
    ],
)
def test_what_is_no_video_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ImageError, match=reason):
        read_all(data)


def test_large_and_long_frames_and_truncated_files_are_refused() -> None:
    file = video_file("avi")
    with pytest.raises(ImageError, match=r"70 x 44 pixels, at most 100 .*--max-image-pixels"):
        read_all(file, 100)
    strip = video_file(frames=[Image.new("RGB", (402, 2))] * 3)
    with pytest.raises(ImageError, match="one side is over 200 times the other"):
        read_all(strip)
    with pytest.raises(ImageError, match="damaged"):
        read_all(file[: len(file) // 2])


def test_frames_that_an_edit_list_hides_are_not_counted() -> None:
    video = read_all(written("mp4", num_hidden=4, rate=10))
    assert len(video.frames) == len(FRAMES) - 4


def test_times_alone_tell_the_frames_of_a_second() -> None:
    """A live recording of a browser says neither its length nor a rate, and its times are uneven."""
    times = np.cumsum([0, *(28 + 7 * (number * number % 3) for number in range(59))])
    video = read_all(written("webm", times=times.tolist()))
    assert len(video.frames) == 60
    assert video.seconds[-1] == pytest.approx(times[-1] / 1000, rel=0.02)


@pytest.mark.parametrize(("degrees", "corner"), [(0, (0, 0)), (90, (1, 0)), (180, (1, 1)), (270, (0, 1))])
def test_frames_are_turned_as_their_file_says(degrees: int, corner: tuple[int, int]) -> None:
    frame = Image.new("RGB", (64, 48))
    frame.paste((255, 255, 255), (0, 0, 16, 16))  # the upper left corner
    found = read_all(turned(written("mp4", frames=[frame] * 3), degrees)).frames[0]
    assert found.size == ((64, 48) if degrees % 180 == 0 else (48, 64))
    column, row = (4 if side == 0 else length - 5 for side, length in zip(corner, found.size, strict=True))
    assert np.asarray(found)[row, column].mean() > 200


def test_titles_in_other_encodings_are_left_alone() -> None:
    marked = written("avi", title="Caf#")
    assert marked.count(b"Caf#") == 1
    assert len(read_all(marked.replace(b"Caf#", b"Caf\xe9")).frames) == len(FRAMES)


def test_a_frame_is_reduced_before_the_next_one_is_decoded(tmp_path: Path) -> None:
    config, sizes = config_of(with_videos(tmp_path, VIDEOS[0])), []
    own = video_reader(config, MAX_PATCHES)

    def reduce(image: Image.Image, count: int) -> Image.Image:
        sizes.append(image.size)
        return own.reduce(image, count)

    video = decode_video(video_file(), own._replace(reduce=reduce), MAX_PIXELS)
    assert sizes == [FRAMES[0].size] * 7
    assert {frame.size for frame in video.frames} == {(64, 32)}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"do_sample_frames": False}, "do_sample_frames: expected true"),
        ({"fps": 2, "num_frames": 8}, "num_frames: expected nothing beside fps"),
        ({"size": {"shortest_edge": 4}}, "longest_edge: expected an integer"),
    ],
)
def test_preprocessing_that_is_not_supported_is_named(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=reason):
        read_video_processor(with_videos(tmp_path, VIDEOS[0], **changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"initial_shift": False}, "initial_shift: expected true"),
        ({"initial_shift": 0.5}, "initial_shift: expected true"),
        ({"do_center_crop": True}, "do_center_crop: expected false"),
    ],
)
def test_frames_of_internvl_that_are_not_supported_are_named(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=reason):
        read_video_processor(with_videos(tmp_path, "internvl_tiny", **changes))


@pytest.mark.parametrize("changes", [{"do_sample_frames": False}, {"size": {"shortest_edge": 4}}])
def test_a_checkpoint_whose_videos_are_not_supported_serves_its_images(
    changes: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = with_videos(tmp_path, VIDEOS[0], **changes)
    decoder, checkpoint = read_decoder(path)
    for limit in (None, "image=4", "image=4,video=0"):
        found = with_served_images(ImagesConfig(limit_mm_per_prompt=limit), decoder, path, checkpoint)
        assert found.vision is not None and not found.vision.has_videos
    assert "videos are not served, images are: " in caplog.text and "video_preprocessor_config.json: " in caplog.text
    with pytest.raises(CheckpointError, match="use video=0 to serve images only"):
        with_served_images(ImagesConfig(limit_mm_per_prompt="video=1"), decoder, path, checkpoint)
    with pytest.raises(ConfigError, match="image=0 serves text only, without videos"):
        ImagesConfig(limit_mm_per_prompt="image=0,video=1")


def test_videos_are_served_if_frames_are_prepared_as_images_are(tmp_path: Path) -> None:
    path = with_videos(tmp_path / "other", VIDEOS[0], image_mean=[0.1, 0.2, 0.3])
    decoder, checkpoint = read_decoder(path)
    found = with_served_images(ImagesConfig(), decoder, path, checkpoint)
    assert found.vision is not None and not found.vision.has_videos
    with pytest.raises(CheckpointError, match="frames of videos are prepared in another way than images"):
        with_served_images(ImagesConfig(limit_mm_per_prompt="video=1"), decoder, path, checkpoint)
    path = with_videos(tmp_path / "own", VIDEOS[0])
    decoder, checkpoint = read_decoder(path)
    found = with_served_images(ImagesConfig(limit_mm_per_prompt="image=4,video=0"), decoder, path, checkpoint)
    assert found.vision is not None and not found.vision.has_videos


def test_a_prepared_video_has_digests_of_its_frames(tmp_path: Path) -> None:
    prepare = load_video_preparer(with_videos(tmp_path, VIDEOS[0]), MAX_PATCHES)
    first = prepare(video_file(), MAX_PIXELS)
    changed = list(FRAMES)
    changed[10] = changed[9]
    second = prepare(video_file(frames=changed), MAX_PIXELS)
    same = [one.digest == other.digest for one, other in zip(first.items, second.items, strict=True)]
    assert same == [True, True, True, False]
