"""GGUF text models read images with the image encoder of an mmproj file, as their Hugging Face directories do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.checkpoint.gguf.file import open_gguf
from jaxserve.checkpoint.image_processor import read_image_processor
from jaxserve.checkpoint.vision_names import VISION
from jaxserve.config import ImagesConfig
from jaxserve.errors import CheckpointError
from jaxserve.frontend.images.processor import process_image
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.preprocessing.images import BudgetSizes, GridTiles
from jaxserve.models.registry import decoder_of, open_model, read_decoder, with_vision
from jaxserve.runner.images.served import with_served_images
from jaxserve.tokenizer.tokenizer import load_tokenizer
from jaxserve.tools.planning.planner import read_model
from tests.models.mmproj_files import CONVERSIONS, GGUFPair, write_pair
from tests.models.pictures import picture
from tests.models.vision_model import PROMPTS, SIZES, VisionGolden
from tests.unit.checkpoint.checkpoint_files import stored, write_decoder, write_gguf

NAMES = list(CONVERSIONS)


@pytest.fixture(scope="module", params=NAMES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GGUFPair:
    return write_pair(tmp_path_factory.mktemp("pair"), request.param)


def only(*names: str) -> Any:
    """Return the mark of a test that needs the files of these models only."""
    return pytest.mark.parametrize("pair", names, indirect=True)


def decoder_at(path: Path, mmproj: Path | None = None) -> DecoderConfig:
    checkpoint = open_model(path, mmproj)
    decoder = with_vision(decoder_of(checkpoint), path, checkpoint.config, mmproj)
    assert decoder.vision is not None
    return decoder


def renamed(path: Path, folder: Path, architecture: str) -> Path:
    """Return a text model's file under another architecture."""
    file = open_gguf(path)
    old = file.metadata["general.architecture"]
    values = {key.replace(f"{old}.", f"{architecture}."): value for key, value in file.metadata.items()}
    del values["general.architecture"]
    return write_gguf(
        folder / "renamed.gguf", architecture, values, {each: ("F32", file.read(each)) for each in file.tensors}
    )


def changed(
    pair: GGUFPair,
    folder: Path,
    change: Callable[[str, np.ndarray], Mapping[str, tuple[str, np.ndarray]]] | None = None,
    **keys: Any,
) -> Path:
    """Return an image encoder with other tensors or keys; a key of None is left out, `__` stands for a dot."""
    file = open_gguf(pair.mmproj)
    values = dict(file.metadata) | {key.replace("__", "."): value for key, value in keys.items()}
    architecture = values.pop("general.architecture")
    tensors = dict[str, tuple[str, np.ndarray]]()
    for name in file.tensors:
        tensors |= {name: ("F32", file.read(name))} if change is None else change(name, file.read(name))
    present = {key: value for key, value in values.items() if value is not None}
    return write_gguf(folder / "mmproj-changed.gguf", architecture, present, tensors)


def without_unused(decoder: DecoderConfig) -> DecoderConfig:
    """Return the config without the names of tensors that are not read, which files do not have."""
    assert decoder.vision is not None
    return replace(decoder, vision=replace(decoder.vision, unused_tensors=()))


def test_configs_and_preprocessing_equal_those_of_the_directory(pair: GGUFPair) -> None:
    assert without_unused(decoder_at(pair.text, pair.mmproj)) == without_unused(decoder_at(pair.source))
    assert read_image_processor(pair.text, pair.mmproj) == read_image_processor(pair.source)


def test_weights_equal_those_of_the_directory(pair: GGUFPair) -> None:
    found, expected = open_model(pair.text, pair.mmproj), open_model(pair.source)
    vision = decoder_at(pair.source).vision
    assert vision is not None
    unused = tuple(f"{VISION}{start}" for start in vision.unused_tensors)
    names = {name for name in expected.tensors if not name.startswith(unused)}
    assert found.tensors.keys() == names
    for name in names:
        own, other = (np.asarray(each.read(name), np.float32) for each in (found, expected))
        assert own.shape == tuple(found.tensors[name].shape) == other.shape, name
        np.testing.assert_allclose(
            own, other, atol=1e-6 if name.endswith(("norm.weight", "A_log")) else 0, rtol=0, err_msg=name
        )


def test_prompts_have_the_tokens_of_transformers(pair: GGUFPair) -> None:
    golden, processor = VisionGolden(pair.source.name), read_image_processor(pair.text, pair.mmproj)
    assert processor is not None
    texts = [process_image(picture(*size, index), processor).text for index, size in enumerate(SIZES)]
    if golden.name.startswith("qwen"):
        texts = [f"<|vision_start|>{text}<|vision_end|>" for text in texts]
    for count, (text, chosen) in PROMPTS.items():
        ids = load_tokenizer(pair.text).encode(text.format(*(texts[index] for index in chosen)))
        assert ids == golden.arrays[f"ids_{count}"].tolist()


def test_a_text_file_alone_is_served_for_texts(pair: GGUFPair) -> None:
    decoder, checkpoint = read_decoder(pair.text)
    assert with_served_images(ImagesConfig(), decoder, pair.text, checkpoint).vision is None
    text_only = read_model(pair.text, ImagesConfig(mmproj=str(pair.mmproj), limit_mm_per_prompt="image=0"))
    assert text_only.decoder.vision is None


@only("mistral3_vision_tiny")
def test_older_files_of_mistral_3_are_named_llama(pair: GGUFPair, tmp_path: Path) -> None:
    text = renamed(pair.text, tmp_path, "llama")
    older, source = decoder_at(text, pair.mmproj), decoder_at(pair.source)
    assert older.vision == source.vision and older.layers == source.layers


@only("smolvlm_tiny")
def test_the_converters_epsilon_of_a_siglip_tower_is_read_as_that_of_transformers(
    pair: GGUFPair, tmp_path: Path
) -> None:
    file = changed(pair, tmp_path, clip__vision__attention__layer_norm_epsilon=1e-5)
    assert decoder_at(pair.text, file) == decoder_at(pair.source)


@only("gemma4_vision_tiny", "internvl_tiny")
def test_sizes_that_published_files_leave_out_are_those_of_the_published_models(pair: GGUFPair, tmp_path: Path) -> None:
    names = ("projector__scale_factor", "image_max_pixels", "preproc_min_tiles", "preproc_max_tiles")
    file = changed(pair, tmp_path, **{f"clip__vision__{name}": None for name in names})
    found = read_image_processor(pair.text, file)
    assert found is not None
    if pair.source.name == "internvl_tiny":
        assert (found.sizes, found.merge) == (GridTiles(24, 1, 12), 2)
    else:
        assert (found.sizes, found.merge) == (BudgetSizes(280 * 9), 3)


@only("gemma3_vision_tiny")
def test_a_plan_counts_the_weights_of_the_image_encoder(pair: GGUFPair) -> None:
    alone, both = read_model(pair.text), read_model(pair.text, ImagesConfig(mmproj=str(pair.mmproj)))
    assert both.decoder == decoder_at(pair.text, pair.mmproj)
    assert alone.stored_bytes is not None and both.stored_bytes is not None
    assert both.stored_bytes - alone.stored_bytes == sum(
        tensor.num_bytes for tensor in open_gguf(pair.mmproj).tensors.values()
    )


@only("qwen2_5_vl_tiny")
def test_matrices_in_16_bits_and_in_blocks_are_read_as_floats(pair: GGUFPair, tmp_path: Path) -> None:
    def smaller(name: str, array: np.ndarray) -> dict[str, tuple[str, np.ndarray]]:
        kind = "F32" if array.ndim == 1 else "F16" if array.shape[-1] % 32 else "Q8_0"
        return {name: stored(kind, array)}

    file = changed(pair, tmp_path, smaller)
    kinds = {tensor.kind.name for tensor in open_gguf(file).tensors.values()}
    assert kinds == {"F32", "F16", "Q8_0"}
    decoder, checkpoint = read_decoder(pair.text, file)
    served = with_served_images(ImagesConfig(mmproj=str(file)), decoder, pair.text, checkpoint, file)
    assert checkpoint is not None and served == decoder_at(pair.source)
    expected = open_model(pair.source)
    for name in expected.tensors:
        own, other = (np.asarray(each.read(name), np.float32) for each in (checkpoint, expected))
        np.testing.assert_allclose(own, other, atol=np.abs(other).max() / 100, rtol=0, err_msg=name)


@only("gemma3_vision_tiny", "qwen2_vl_tiny")
def test_files_of_old_converters_with_swapped_names_and_no_sizes_are_read(pair: GGUFPair, tmp_path: Path) -> None:
    def swapped(name: str, array: np.ndarray) -> dict[str, tuple[str, np.ndarray]]:
        up, down = ".ffn_up.", ".ffn_down."
        other = name.replace(up, down) if up in name else name.replace(down, up)
        return {other: ("F32", array)}

    old = {"general__type": None, "clip__vision__feed_forward_length": 0, "clip__vision__projection_dim": 0}
    if pair.source.name.startswith("qwen2"):  # a square matrix does not say how it is named
        swapped_file = changed(pair, tmp_path, None, **old)
    else:
        swapped_file = changed(pair, tmp_path, swapped, **old)
    assert decoder_at(pair.text, swapped_file) == decoder_at(pair.source)
    found, expected = open_model(pair.text, swapped_file), open_model(pair.source)
    name = "vision.layers.1.mlp.fc1.weight"
    np.testing.assert_array_equal(np.asarray(found.read(name)), np.asarray(expected.read(name), np.float32))


@only("gemma3_vision_tiny", "llava_padded_tiny")
def test_a_vocabulary_without_the_image_token_has_an_unused_one_in_its_place(pair: GGUFPair, tmp_path: Path) -> None:
    file = open_gguf(pair.text)
    kinds = {"gemma3": ("<image_soft_token>", "<unused0>"), "llama": ("<image>", "<unk>")}
    image, unused = kinds[file.metadata["general.architecture"]]
    tokens = [unused if token == image else token for token in file.metadata["tokenizer.ggml.tokens"]]
    values = dict(file.metadata) | {"tokenizer.ggml.tokens": tokens}
    architecture = values.pop("general.architecture")
    text = write_gguf(tmp_path / "text.gguf", architecture, values, {n: ("F32", file.read(n)) for n in file.tensors})
    processor = read_image_processor(text, pair.mmproj)
    assert processor is not None and processor.markup.token == unused
    assert processor.image_token_id == tokens.index(unused)
    assert load_tokenizer(text).encode(unused * 2) == [tokens.index(unused)] * 2
    values["tokenizer.ggml.tokens"] = [f"{token} " if token == unused else token for token in tokens]
    text = write_gguf(tmp_path / "none.gguf", architecture, values, {n: ("F32", file.read(n)) for n in file.tensors})
    with pytest.raises(CheckpointError, match=rf"^--mmproj .*: its images need the token {image} or {unused}[, ]"):
        open_model(text, pair.mmproj)


@only("llava_padded_tiny", "llava_next_tiny")
def test_features_of_a_layer_before_the_last_one_are_read_if_the_file_says_so(pair: GGUFPair, tmp_path: Path) -> None:
    vision = decoder_at(pair.text, changed(pair, tmp_path, clip__vision__feature_layer=[1])).vision
    assert vision is not None and vision.num_layers == 1 and "layers.1." in vision.unused_tensors


@only("llava_padded_tiny")
def test_a_projector_of_llava_with_another_tower_is_refused(pair: GGUFPair, tmp_path: Path) -> None:
    def siglip(name: str, array: np.ndarray) -> dict[str, tuple[str, np.ndarray]]:
        return {} if name == "v.class_embd" else {name: ("F32", array)}

    with pytest.raises(
        CheckpointError, match=r"^--mmproj .*: tensor 'v.class_embd': expected the class token of a CLIP"
    ):
        open_model(pair.text, changed(pair, tmp_path, siglip))


@only("llava_next_tiny")
def test_sizes_of_tiles_are_pairs(pair: GGUFPair, tmp_path: Path) -> None:
    file = changed(pair, tmp_path, clip__vision__image_grid_pinpoints=[28, 56, 28])
    with pytest.raises(CheckpointError, match=r"image_grid_pinpoints': expected pairs of pixels, found \[28, 56, 28\]"):
        open_model(pair.text, file)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"clip__vision__projection_dim": 64}, "it makes embeddings of 64 numbers, and those of .* have 48"),
    "audio": (
        {"clip__has_vision_encoder": None, "clip__has_audio_encoder": True, "clip__projector_type": "ultravox"},
        r"it has no image encoder \(projector type 'ultravox'\), audio is not served",
    ),
    "unknown": (
        {"clip__projector_type": "resampler"},
        "the projector type 'resampler' is not supported; supported: gemma3, ",
    ),
    "other": (
        {"clip__projector_type": "qwen2vl_merger"},
        "projectors of type qwen2vl_merger go with text models of architecture qwen2vl; .* is 'gemma3'",
    ),
}


@only("gemma3_vision_tiny")
@pytest.mark.parametrize("case", REFUSED)
def test_files_that_do_not_go_together_are_refused_in_one_line(pair: GGUFPair, case: str, tmp_path: Path) -> None:
    keys, expected = REFUSED[case]
    file = changed(pair, tmp_path, **keys)
    with pytest.raises(CheckpointError, match=f"^--mmproj .*mmproj-changed.gguf: {expected}") as error:
        read_decoder(pair.text, file)
    assert "\n" not in str(error.value)


@only("gemma3_vision_tiny")
def test_an_encoder_goes_with_a_gguf_text_model_only(pair: GGUFPair, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"^--mmproj .*: goes with a model in a GGUF file; the image encoder of .*tiny"
    ):
        read_decoder(pair.source, pair.mmproj)
    with pytest.raises(CheckpointError, match=r"^--mmproj .*general.architecture clip\), found 'gemma3'"):
        read_decoder(pair.text, pair.text)
    with pytest.raises(CheckpointError, match=r"is an image encoder; give it with --mmproj, and the text model's file"):
        read_decoder(pair.mmproj)


@only("gemma3_vision_tiny")
def test_errors_of_the_file_itself_name_the_setting(pair: GGUFPair, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    for num_bytes, expected in ((40_000, "tensor .* found a file of 40000 bytes"), (700, ""), (0, "")):
        cut.write_bytes(pair.mmproj.read_bytes()[:num_bytes])
        with pytest.raises(CheckpointError, match=f"^--mmproj .*cut.gguf: {expected}"):
            read_decoder(pair.text, cut)
    with pytest.raises(CheckpointError, match=r"^--mmproj .*: key 'clip\.vision\.block_count': "):
        read_decoder(pair.text, changed(pair, tmp_path, clip__vision__block_count=None))
    split = write_decoder(tmp_path / "split.gguf", "llama", num_files=2)
    with pytest.raises(CheckpointError, match=r"^--mmproj .*: expected one file, found the first of 2$"):
        read_decoder(pair.text, split)


@only("gemma3_vision_tiny")
def test_a_tensor_without_a_place_is_named(pair: GGUFPair, tmp_path: Path) -> None:
    def more(name: str, array: np.ndarray) -> dict[str, tuple[str, np.ndarray]]:
        return {name: ("F32", array)} | ({"v.blk.0.other.weight": ("F32", array)} if name == "v.post_ln.bias" else {})

    with pytest.raises(
        CheckpointError, match=r"tensor 'v\.blk\.0\.other\.weight': it has no place in an image encoder"
    ):
        open_model(pair.text, changed(pair, tmp_path, more))


@only("mistral3_vision_tiny")
def test_rows_in_another_order_are_not_split_out_of_one_matrix(pair: GGUFPair, tmp_path: Path) -> None:
    def fused(name: str, array: np.ndarray) -> dict[str, tuple[str, np.ndarray]]:
        return {
            name.replace("attn_q.", "attn_qkv."): ("F32", np.concatenate([array] * 3) if "attn_q." in name else array)
        }

    with pytest.raises(
        CheckpointError, match=r"tensor 'v\.blk\.0\.attn_qkv\.weight': expected queries, keys and values"
    ):
        open_model(pair.text, changed(pair, tmp_path, fused))


@only("gemma4_vision_odd_tiny")
def test_bounds_of_a_matmul_are_one_number_each(pair: GGUFPair, tmp_path: Path) -> None:
    def longer(name: str, array: np.ndarray) -> dict[str, tuple[str, np.ndarray]]:
        return {name: ("F32", np.ones(2, np.float32) if name == "v.blk.0.attn_q.input_max" else array)}

    whole, damaged = (open_model(pair.text, each).tensors for each in (pair.mmproj, changed(pair, tmp_path, longer)))
    (missing,) = whole.keys() - damaged.keys()
    assert missing.endswith(".q_proj.bounds"), "a vector of four numbers was read from five"


@only("qwen2_5_vl_tiny")
def test_absurd_sizes_of_an_encoder_are_refused(pair: GGUFPair, tmp_path: Path) -> None:
    def halved(name: str, array: np.ndarray) -> dict[str, tuple[str, np.ndarray]]:
        return {name: ("F32", array[:, :1] if name == "v.patch_embd.weight.1" else array)}

    with pytest.raises(
        CheckpointError, match=r"block_count': expected a whole number from 1 to 1024, found 2147483647"
    ):
        open_model(pair.text, changed(pair, tmp_path, clip__vision__block_count=(1 << 31) - 1))
    with pytest.raises(
        CheckpointError, match=r"^--mmproj .*: tensor 'v\.patch_embd\.weight\.1': expected the shape \("
    ):
        open_model(pair.text, changed(pair, tmp_path, halved))


@only("qwen3_vl_tiny")
def test_a_text_model_with_other_deepstack_layers_is_refused(pair: GGUFPair, tmp_path: Path) -> None:
    file = changed(pair, tmp_path, clip__vision__is_deepstack_layers=[True, False, False])
    with pytest.raises(
        CheckpointError, match=r"it has features for 1 layers of the text model, and .* takes those of 2"
    ):
        open_model(pair.text, file)
