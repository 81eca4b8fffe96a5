"""Models of documents: configs as published, sizes of pictures, what is refused, and prompts of their chat templates."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxserve.checkpoint.safetensors_file import open_safetensors
from jaxserve.errors import InvalidRequestError
from jaxserve.frontend.images.processor import bounded_size
from jaxserve.frontend.images.tiles import grid_size, page_grid
from jaxserve.layers.policy import plain as plain_policy
from jaxserve.model_config.preprocessing.images import AreaSizes, DensePages, GridTiles, MarkedTiles
from jaxserve.models.registry import decoder_of, open_model, read_decoder, read_mtp_layer, with_vision
from jaxserve.models.skeleton import make_predictor_skeleton, make_skeleton
from jaxserve.quant.tensor import as_floats
from jaxserve.tokenizer.tokenizer import load_tokenizer
from jaxserve.weights.loader import check_tensors
from tests.models.goldens import DATA
from tests.models.vision_files import processor_of, vision_of
from tests.unit.checkpoint.checkpoint_files import write_safetensors

PADDLE, LIGHTON, GLM, QIANFAN, DOCLING = (
    DATA / "vision" / f"{name}_tiny"
    for name in ("paddleocr_vl", "lighton_ocr", "glm_ocr", "qianfan_ocr", "granite_docling")
)
TEXT: dict[str, Any] = {
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 16,
    "num_hidden_layers": 18,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000,
    "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
    "tie_word_embeddings": False,
    "use_bias": False,
    "vocab_size": 103_424,
}
"""Keys that published PaddleOCR-VL configs have beside `vision_config`, with further ones that change nothing."""
FIXED = {"compression_ratio": 1.0, "rope_is_neox_style": True, "use_3d_rope": True, "weight_share_add_bias": True}


def changed(folder: Path, model: Path, file: str = "config.json", **keys: Any) -> Path:
    """Return a copy of a model, or the copy that `folder` has, with other values in one of its files; None removes a key."""
    if folder != model:
        shutil.copytree(model, folder, dirs_exist_ok=True)
    values = json.loads((folder / file).read_text()) | keys
    (folder / file).write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return folder


def test_paddleocr_configs_as_published_have_the_values_of_transformers(tmp_path: Path) -> None:
    whole = {"architectures": ["PaddleOCRVLForConditionalGeneration"], "model_type": "paddleocr_vl"}
    found = []
    for config in (
        {**whole, **TEXT, **FIXED, "vision_config": {"model_type": "paddleocr_vl"}},
        {
            **whole,
            "tie_word_embeddings": False,
            "vision_config": {},
            "text_config": {"rope_parameters": {"rope_theta": 5e5}},
        },
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        found.append(read_decoder(tmp_path)[0])
    assert found[0] == found[1]
    assert (found[0].rotary_pairs, found[0].head_dim, found[0].tied_embeddings) == ("halves", 128, False)


def test_tensors_of_published_paddleocr_checkpoints_that_nothing_reads_are_left_out(tmp_path: Path) -> None:
    path, file = changed(tmp_path, PADDLE), open_safetensors(PADDLE / "model.safetensors")
    tensors = {name: np.asarray(file.read(name), np.float32) for name in file.tensors}
    start = "visual.vision_model."
    more = ("embeddings.packing_position_embedding.weight", "head.probe", "head.attention.in_proj_weight")
    write_safetensors(
        path / "model.safetensors", tensors | {start + name: np.zeros((2, 2), np.float32) for name in more}
    )
    checkpoint = open_model(path)
    config = with_vision(decoder_of(checkpoint), path, checkpoint.config)
    check_tensors(checkpoint, make_skeleton(config, plain_policy(np.dtype("float32"))))


@pytest.mark.parametrize("shape", [(1,), ()])
def test_queries_keys_and_values_of_a_tower_share_the_scale_of_their_matrix(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    group = {
        "targets": ["re:.*attn.qkv"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False},
        "input_activations": None,
    }
    scheme = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    path, file = changed(tmp_path, GLM, quantization_config=scheme), open_safetensors(GLM / "model.safetensors")
    tensors = {name: np.asarray(file.read(name)) for name in file.tensors}
    for name in [each for each in tensors if each.endswith(".attn.qkv.weight")]:
        whole = tensors[name].astype(np.float32)
        scale = np.abs(whole).max() / 448
        tensors[name] = (whole / scale).astype(ml_dtypes.float8_e4m3fn)
        tensors[f"{name}_scale"] = np.full(shape, scale, np.float32)
    write_safetensors(path / "model.safetensors", tensors)
    found, expected = open_model(path), open_model(GLM)
    config = with_vision(decoder_of(found), path, found.config)
    check_tensors(found, make_skeleton(config, plain_policy(np.dtype("float32"))))
    for part in ("q", "k", "v"):
        name = f"vision.layers.0.self_attn.{part}_proj.weight"
        stored = found.read(name)
        assert not isinstance(stored, np.ndarray)
        own, other = (as_floats(each).astype(np.float32) for each in (stored, expected.read(name)))
        assert np.abs(own - other).max() < 0.05 * np.abs(other).max()


def test_sizes_of_paddleocrs_pictures_equal_those_of_transformers() -> None:
    module = pytest.importorskip("transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl")
    random = np.random.default_rng(0)
    for factor, low, high in ((28, 147_384, 2_822_400), (28, 384 * 384, 1536 * 1536), (15, 1024, 3072)):
        sizes = AreaSizes(low, high, enlargement="in_turn")
        for height, width in [*random.integers(1, 3000, (150, 2)).tolist(), *random.integers(1, 40, (50, 2)).tolist()]:
            try:
                expected = module.smart_resize(height, width, factor, low, high)
            except ValueError:
                with pytest.raises(InvalidRequestError):
                    bounded_size(height, width, factor, sizes)
            else:
                assert bounded_size(height, width, factor, sizes) == expected


def test_the_first_release_of_lighton_ocr_is_read_as_later_ones_are(tmp_path: Path) -> None:
    decoder, vision = read_decoder(LIGHTON)[0], vision_of(LIGHTON)
    processor = processor_of(LIGHTON)
    text = json.loads((LIGHTON / "config.json").read_text())["text_config"] | {"tie_word_embeddings": True}
    first = {
        "architectures": ["LightOnOCRForConditionalGeneration"],
        "model_type": "mistral3",
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "tie_word_embeddings": None,
        "text_config": text,
    }
    path = changed(tmp_path, LIGHTON, **first)
    changed(path, path, "preprocessor_config.json", patch_size=8)
    changed(path, path, "tokenizer_config.json", extra_special_tokens=None)
    assert read_decoder(path)[0] == decoder and decoder.tied_embeddings
    assert vision_of(path) == vision
    assert processor_of(path) == processor


def test_the_layer_that_glm_ocr_predicts_tokens_with_is_read_and_is_no_layer_of_the_model(tmp_path: Path) -> None:
    text = json.loads((GLM / "config.json").read_text())["text_config"]
    path = changed(tmp_path, GLM, text_config={**text, "num_nextn_predict_layers": 1})
    file, width = open_safetensors(GLM / "model.safetensors"), text["hidden_size"]
    tensors = {name: np.asarray(file.read(name), np.float32) for name in file.tensors}
    start = "model.language_model.layers."
    layer = {
        name.replace(f"{start}0.", f"{start}3."): array
        for name, array in tensors.items()
        if name.startswith(f"{start}0.")
    }
    layer |= {f"{start}3.{name}.weight": np.ones(width, np.float32) for name in ("enorm", "hnorm", "shared_head.norm")}
    layer[f"{start}3.eh_proj.weight"] = np.ones((width, 2 * width), np.float32)
    layer[f"{start}3.embed_tokens.weight"] = tensors["model.language_model.embed_tokens.weight"]
    write_safetensors(path / "model.safetensors", tensors | layer)
    model = open_model(path)
    assert model.tensors.keys() == open_model(GLM).tensors.keys()
    config, checkpoint = read_mtp_layer(path)
    assert checkpoint is not None and (config.num_layers, config.qkv_bias, config.norm_placement) == (
        1,
        False,
        "sandwich",
    )
    check_tensors(checkpoint, make_predictor_skeleton(config, plain_policy(np.dtype("float32"))))


def test_qianfan_ocr_is_read_with_the_names_of_its_publisher(tmp_path: Path) -> None:
    path, file = changed(tmp_path, QIANFAN), open_safetensors(QIANFAN / "model.safetensors")
    names = {name: name.replace("language_model.model.encoder.", "language_model.model.") for name in file.tensors}
    assert names.keys() != set(names.values()), "transformers saves other names"
    write_safetensors(path / "model.safetensors", {names[name]: np.asarray(file.read(name)) for name in names})
    published, saved = open_model(path), open_model(QIANFAN)
    assert {name: info.shape for name, info in published.tensors.items()} == {
        name: info.shape for name, info in saved.tensors.items()
    }


def test_a_placeholder_that_is_no_control_token_is_broken_in_messages() -> None:
    config, tokenizer = processor_of(QIANFAN), load_tokenizer(QIANFAN)
    assert config.markup.placeholder == "<image>"
    assert not tokenizer.control_tokens.include(["<image>"])
    image = {"type": "image"}
    found = [
        tokenizer.encode_chat(
            [{"role": "user", "content": [image, {"type": "text", "text": text}]}],
            placeholders=["<image>"],
            images=["<img></img>"],
        )
        for text in ("What is <image>?", "What is it?")
    ]
    marks = tokenizer.encode("<img></img>")
    assert [sum(each in marks for each in ids) for ids in found] == [2, 2]
    assert tokenizer.decode(found[0]).count("<image>") == 1


def test_grids_of_pages_equal_those_of_transformers() -> None:
    module = pytest.importorskip("transformers.models.granite_docling.image_processing_pil_granite_docling")
    random, size = np.random.default_rng(0), {"height": 512, "width": 512}
    rules = (None, DensePages(48, 0.7, 1.2, 0.0), DensePages(6, 0.0, 1.1, 3.0), DensePages(40, 0.9, 0.0, 2.0))
    for most, rule in itertools.product((1, 8, 32), rules):
        dense = () if rule is None else (rule.max_tiles, rule.scale, rule.min_ratio, rule.max_ratio)
        sizes = MarkedTiles(GridTiles(512, 1, most, 16), rule if most > 1 else None)
        for width, height in [*random.integers(1, 9000, (60, 2)).tolist(), *random.integers(1, 600, (20, 2)).tolist()]:
            rows, columns = module.get_page_tile_grid(height, width, size, True, 1, most, *dense)
            assert grid_size(width, height, page_grid(width, height, sizes)) == (columns, rows)


def test_the_text_part_of_granite_for_docling_has_the_defaults_of_transformers(tmp_path: Path) -> None:
    whole = {"architectures": ["GraniteDoclingForConditionalGeneration"], "text_config": {}, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config, _ = read_decoder(tmp_path)
    assert (config.num_layers, config.num_kv_heads, config.vocab_size, config.tied_embeddings) == (28, 4, 133_800, True)
    assert (config.embedding_scale, config.residual_scale, config.attention_scale) == (12.0, 0.263, 0.015625)
    assert config.logit_scale == 0.25


_IN_ORDER = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for item in message.content %}{% if item.type == 'image' or 'image' in item %}IMAGE"
    "{% elif item.type == 'text' %}{{ item.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}Reply: "
)
"""Parts in the order of the request, as in the templates of GLM-OCR and LightOnOCR."""
_IMAGES_FIRST = (
    '{%- if not image_token is defined -%}{%- set image_token = "IMAGE" -%}{%- endif -%}'
    '{%- for message in messages -%}{{- "User: " -}}'
    '{%- for content in message["content"] -%}{%- if content["type"] == "image" -%}{{ image_token }}{%- endif -%}{%- endfor -%}'
    '{%- for content in message["content"] -%}{%- if content["type"] == "text" -%}{{ content["text"] }}{%- endif -%}{%- endfor -%}'
    '{{ "\\n" -}}{%- endfor -%}{{- "Reply: " -}}'
)
"""Images before texts, as in the template of PaddleOCR-VL."""
_MARKED, _PLACED = "<|begin_of_image|>{}<|end_of_image|>", "<|IMAGE_START|>{}<|IMAGE_END|>"
PROMPTS: list[tuple[Path, str, str, list[str | None], str]] = [
    (GLM, _IN_ORDER, _MARKED, [None, "Text Recognition:"], "<|im_start|>user\n{}Text Recognition:<|im_end|>\nReply: "),
    (GLM, _IN_ORDER, _MARKED, ["Text Recognition:", None], "<|im_start|>user\nText Recognition:{}<|im_end|>\nReply: "),
    (LIGHTON, _IN_ORDER, "{}", [None], "<|im_start|>user\n{}<|im_end|>\nReply: "),
    (QIANFAN, _IN_ORDER, "{}\n", [None, "Parse this."], "<|im_start|>user\n{}Parse this.<|im_end|>\nReply: "),
    (PADDLE, _IMAGES_FIRST, _PLACED, [None, "OCR:"], "User: {}OCR:\nReply: "),
    (PADDLE, _IMAGES_FIRST, _PLACED, ["OCR:", None, None], "User: {}{}OCR:\nReply: "),
]
"""A model, a template, marks around an image, the parts of a message, None for an image, and the prompt."""


@pytest.mark.parametrize(("path", "template", "marks", "parts", "prompt"), PROMPTS)
def test_documented_prompts_have_images_and_texts_in_the_order_of_the_template(
    path: Path, template: str, marks: str, parts: list[str | None], prompt: str, tmp_path: Path
) -> None:
    config = processor_of(path)
    token, count = config.markup.token, parts.count(None)
    (tmp_path / "template.jinja").write_text(template.replace("IMAGE", marks.format(config.markup.placeholder), 1))
    tokenizer = load_tokenizer(path, chat_template=tmp_path / "template.jinja")
    content = [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts]
    texts = [token * 3, token * 2][:count]
    ids = tokenizer.encode_chat(
        [{"role": "user", "content": content}], placeholders=[config.markup.placeholder] * len(texts), images=texts
    )
    assert ids == tokenizer.encode(prompt.format(*map(marks.format, texts)))
