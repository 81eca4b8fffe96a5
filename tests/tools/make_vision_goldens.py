"""Write the tiny checkpoints of tests/models/data/vision and what transformers computes with them.

Run from the repository root where torch, torchvision and transformers are installed:
python tests/tools/make_vision_goldens.py [NAME ...]
Written by hand are config.json and preprocessor_config.json of a folder, and its line of ../processors.json: the class of its
processor, the text of an image in prompts, the control tokens of images, those that tokenizer_config.json names, and arguments of
the class. This program adds what else a published model holds and golden.npz, computed in float32 with eager attention from exactly
those files. Picture number i of `SIZES` is tests.models.pictures.picture(width, height, i):
    pixels_i (P, F) uint8, patches in the order of `EncoderItem`, of all items, by the image processor that uses Pillow;
    default_i (P, F) int16, added to them by the default one, which uses torchvision; features_i (N, W) float32;
    ids_1, ids_3 (T) int32, the processor's tokens of the prompts PROMPTS with 1 and 3 pictures; logits_1, logits_3
    (8, V) float32 of the last 8 positions; outputs_1, outputs_3 (24) int32, greedy and not stopping at end tokens;
    positions_3 (3, T) and delta_3 of models with M-RoPE.
Seeds are tried until no two best logits come close, other pictures give other tokens, and no reply has a token that stands for
an image, a sound or a video, which some models read as padding.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import tokenizers
import torch
import transformers
from make_goldens import BOS, CORPUS, EOS, random_weights
from safetensors.torch import load_file, save_file
from torchvision.transforms.v2 import functional
from transformers.models.gemma4_unified import modeling_gemma4_unified

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.models.pictures import picture

DATA = Path(__file__).parents[1] / "models" / "data" / "vision"
NUM_TOKENS, NUM_LOGITS, MIN_GAP, MIN_MOVED = 24, 8, 5e-3, 0.1
VOCAB_SIZE = 352
SIZES = ((80, 50), (30, 45), (20, 22))
"""Widths and heights of the pictures of a golden."""
SPEECH = ("talker.model", "code2wav.pre_transformer", "token2wav.code2wav_dit_model")
"""Modules of omni models that make speech, of which a checkpoint has a tensor each."""
PROMPTS = {1: ("Look: {}\nhello", (0,)), 3: ("{} and {}, then{}?\n\nHow are you", (2, 0, 1))}
"""Number of pictures: the text with a place for each, and the pictures."""


@dataclass(frozen=True, slots=True)
class VisionCheckpoint:
    """A checkpoint, as far as it is written by hand."""

    config: dict[str, Any]
    processor: dict[str, Any]
    processor_class: str
    placeholder: str
    """Text of an image in the prompts of the golden."""
    markers: list[str]
    named_tokens: dict[str, str]
    """Control tokens under their names in `tokenizer_config.json`."""
    processor_keys: dict[str, Any]
    """Further arguments of the processor's class."""


def read_checkpoint(name: str) -> VisionCheckpoint:
    """Read what is written by hand of a folder."""
    config, processor = (
        json.loads((DATA / name / file).read_text()) for file in ("config.json", "preprocessor_config.json")
    )
    row = processors()[name]
    return VisionCheckpoint(
        config, processor, row["class"], row["image"], row["markers"], row.get("names", {}), row.get("keys", {})
    )


def processors() -> dict[str, dict[str, Any]]:
    """Return the rows of processors.json by the names of folders."""
    found: dict[str, dict[str, Any]] = json.loads((DATA.parent / "processors.json").read_text())
    return found


def save_tokenizer(folder: Path, tiny: VisionCheckpoint) -> None:
    """Write a byte-level BPE with the control tokens of the checkpoint's images."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=1,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", *tiny.markers],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS + "\n\n\n a\n\nb"], trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "extra_special_tokens": tiny.named_tokens,
        "chat_template": chat_template(tiny.placeholder),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def chat_template(placeholder: str) -> str:
    """Return a template that writes `placeholder` for each image of a message."""
    return (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}{{ '" + placeholder + "' }}{% elif part['type'] == 'text' %}"
        "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


def random_tower(model: Any, seed: int) -> None:
    """Give towers and connectors weights under which patches attend unevenly."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for name, weight in model.named_parameters():
        if "language_model" in name or "text_model" in name or "lm_head" in name:
            continue
        noise = torch.randn(weight.shape, generator=generator)
        fan_in = weight.shape[0] if name.endswith("projection_weight") else weight.numel() // weight.shape[0]
        if "norm" in name and name.endswith("weight"):
            value = (0 if "soft_emb_norm" in name else 1) + 0.2 * noise
        elif name.endswith("bias"):
            value = 0.2 * noise
        elif "pos_embed" in name or "position_embedding" in name:
            value = 0.5 * noise
        elif name.endswith("projection_weight"):  # beside embeddings of texts that are multiplied
            value = 6 * noise / fan_in**0.5
        elif (
            "vision_tower" in name and "patch_embedding" in name
        ):  # Gemma 3 averages what patches have of their picture
            value = 5 * noise / fan_in**0.5
        else:
            value = 1.3 * noise / fan_in**0.5
        weight.data.copy_(value)
    for name, buffer in model.named_buffers():
        noise = torch.randn(buffer.shape, generator=generator)
        if "vision_tower" in name and name.endswith(("_min", "_max")):  # some numbers of every matmul are clipped
            buffer.copy_((1.5 + 0.2 * noise.abs()) * (-1 if name.endswith("_min") else 1))
        elif name.endswith(("std_bias", "std_scale")):
            buffer.copy_((1 if name.endswith("std_scale") else 0) + 0.3 * noise)


def load(folder: Path) -> Any:
    """Return the folder's model in float32."""
    hf = json.loads((folder / "config.json").read_text())
    kinds = {"attn_implementation": "eager", "experts_implementation": "eager"}
    if "thinker_config" in hf:
        kinds["config"] = transformers.AutoConfig.from_pretrained(folder).thinker_config
    return text_class(hf).from_pretrained(folder, dtype=torch.float32, **kinds).eval()


def text_class(hf: dict[str, Any]) -> Any:
    """Return transformers' class of a model, or of the part of an omni model that makes texts."""
    name = hf["architectures"][0]
    return getattr(transformers, name.replace("ForCond", "ThinkerForCond") if "thinker_config" in hf else name)


def make_processor(folder: Path, tiny: VisionCheckpoint, backend: str | None = "pil") -> Any:
    """Return transformers' own processor. backend: of its image processor; None: the one that is chosen by default."""
    images = transformers.AutoImageProcessor.from_pretrained(folder, backend=backend)
    # AutoTokenizer gives some model types a pre-tokenizer of their own, whatever tokenizer.json says.
    tokens = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    keys = {
        name: getattr(transformers, value)() if name in ("video_processor", "feature_extractor") else value
        for name, value in tiny.processor_keys.items()
    }
    return getattr(transformers, tiny.processor_class)(image_processor=images, tokenizer=tokens, **keys)


@contextmanager
def resizing_with_pillow() -> Iterator[None]:
    """Let image processors that have no implementation with Pillow (LFM2-VL) resize with it."""
    kept = functional.resize

    def resize(image: torch.Tensor, size: Any, interpolation: Any, **options: Any) -> torch.Tensor:
        number = PIL.Image.Resampling[interpolation.name] if hasattr(interpolation, "name") else interpolation
        flat, (height, width) = image.reshape(-1, *image.shape[-3:]), size
        pictures = [PIL.Image.fromarray(each.permute(1, 2, 0).numpy()) for each in flat]
        made = [np.asarray(each.resize((width, height), number)) for each in pictures]
        return torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2).reshape(*image.shape[:-2], height, width)

    functional.resize = resize
    try:
        yield
    finally:
        functional.resize = kept


def inputs(
    processor: Any, text: str, tiny: VisionCheckpoint, pictures: list[Any], *, is_default: bool = False
) -> dict[str, Any]:
    """Return the model's inputs of a prompt. is_default: the image processor is the one that is chosen by default."""
    places = [tiny.placeholder] * len(pictures)
    with nullcontext() if is_default else resizing_with_pillow():
        asked = {"return_mm_token_type_ids": True} if tiny.config["model_type"] == "cosmos3_edge" else {}
        given = dict(processor(text=[text.format(*places)], images=[pictures], return_tensors="pt", **asked))
        if given["pixel_values"].dtype == torch.bfloat16:  # Llama 4's, which do not say what pixels they come from
            options = {"do_rescale": False, "do_normalize": False, "return_tensors": "pt"}
            given["pixels"] = processor.image_processor(images=[pictures], **options)["pixel_values"]
    given.pop("labels", None)
    return {name: value.float() if name == "pixel_values" else value for name, value in given.items()}


def patches(given: dict[str, Any], config: dict[str, Any], processor: dict[str, Any]) -> np.ndarray:
    """Return the pixels of a prompt's pictures as 8-bit patches, block by block."""
    values, means = given["pixel_values"].double(), torch.tensor(processor["image_mean"], dtype=torch.float64)
    deviations = torch.tensor(processor["image_std"], dtype=torch.float64)
    if "pixels" in given:
        wide = (1, 3, 1, 1)
        values = (given.pop("pixels").double() / 255 - means.reshape(wide)) / deviations.reshape(wide)
    if "image_grid_thw" in given and values.dim() == 4:  # one frame, row by row
        (_, height, width), own = given["image_grid_thw"][0].tolist(), config["vision_config"]
        merge = own["spatial_merge_size"] if "spatial_merge_size" in own else own["merge_kernel_size"][0]
        values = values.flatten(2)[block_order(height, width, merge)]
    elif config["model_type"] == "muse_glimmer":  # frames before channels, row by row
        (_, height, width), own = given["image_grid_thw"][0].tolist(), config["vision_config"]
        frames = values.reshape(len(values), own["patch_temporal"], 3, -1)
        assert torch.equal(frames[:, 0], frames[:, -1])
        values = frames[:, 0][block_order(height, width, own["merge_size"])]
    elif config["model_type"] == "cosmos3_edge":  # channels last
        values = values.reshape(len(values), -1, 3).transpose(1, 2)
    elif "image_grid_thw" in given:
        frames = values.reshape(len(values), 3, processor["temporal_patch_size"], -1)
        assert torch.equal(frames[:, :, 0], frames[:, :, -1])
        values = frames[:, :, 0]
    elif "target_sizes" in given:
        size, inner = processor["patch_size"], 1 if processor["downsample_mode"] == "4x" else 2
        columns = values[0].reshape(3, size, -1, size).permute(2, 0, 1, 3).flatten(2)  # (P, 3, pixels)
        parts = columns.split(given["target_sizes"].prod(-1).tolist())
        shapes = given["target_sizes"].tolist()
        values = torch.cat([own[window_order(*shape, inner)] for own, shape in zip(parts, shapes, strict=True)])
    elif "spatial_shapes" in given:
        shapes, merge = given["spatial_shapes"].tolist(), config["downsample_factor"]
        places = [np.indices(shape)[::-1].reshape(2, -1).T for shape in shapes]
        parts = zip(values, places, strict=True)
        values = torch.cat([in_blocks(own, torch.from_numpy(each.copy()), merge) for own, each in parts])
    elif "image_position_ids" in given:
        is_merged = config["model_type"] == "gemma4_unified"
        merge = 1 if is_merged else config["vision_config"]["pooling_kernel_size"]
        values = in_blocks(values[0], given["image_position_ids"][0], merge)
    elif "image_sizes" in given and values.dim() == 4:
        size, merge = config["vision_config"]["patch_size"], block_side(config)
        sizes = given["image_sizes"].tolist()
        own = [whole[:, :height, :width] for whole, (height, width) in zip(values, sizes, strict=True)]
        values = torch.cat([in_lines(each, size, merge) for each in own])
    else:
        size, merge = config["vision_config"]["patch_size"], block_side(config)
        size = size[0] if isinstance(size, list) else size
        cut = torch.nn.functional.unfold(values.flatten(0, -4), size, stride=size)  # (tiles, F, P)
        side = round(cut.shape[-1] ** 0.5)
        order = [
            (top + row) * side + left + column
            for top in range(0, side, merge)
            for left in range(0, side, merge)
            for row in range(merge)
            for column in range(merge)
        ]
        values = cut[:, :, order].transpose(1, 2).reshape(-1, 3, size * size)
    pixels = (values * deviations[:, None] + means[:, None]) * 255
    assert (pixels - pixels.round()).abs().max() < 1e-3
    return pixels.round().to(torch.uint8).flatten(1).numpy()


def in_lines(pixels: torch.Tensor, size: int, merge: int) -> torch.Tensor:
    """Return an image's patches, (P, 3, pixels), block by block."""
    cut = torch.nn.functional.unfold(pixels[None], size, stride=size)[0].T.reshape(-1, 3, size * size)
    height, width = (side // size for side in pixels.shape[1:])
    return cut[block_order(height, width, merge)]


def block_order(height: int, width: int, merge: int) -> np.ndarray:
    """Return the numbers of patches, which follow each other row by row, in the order of blocks."""
    rows, columns = np.indices((height, width)).reshape(2, -1)
    return np.lexsort((columns % merge, rows % merge, columns // merge, rows // merge))


def window_order(height: int, width: int, inner: int) -> np.ndarray:
    """Return the numbers of patches in the order of blocks of 2 x 2 windows with sides of `inner` patches, window by window."""
    rows, columns = np.indices((height, width)).reshape(2, -1)
    block = 2 * inner
    places = (columns % inner, rows % inner, columns % block // inner, rows % block // inner)
    return np.lexsort((*places, columns // block, rows // block))


def in_blocks(values: torch.Tensor, places: torch.Tensor, merge: int) -> torch.Tensor:
    """Return an image's patches, (P, 3, pixels), block by block. places: column and row of each patch; -1: padding."""
    count = int((places[:, 0] >= 0).sum())
    columns, rows = places[:count].T.numpy()
    order = np.lexsort((columns % merge, rows % merge, columns // merge, rows // merge))
    return values[:count][order.copy()].reshape(count, -1, 3).transpose(1, 2)


def block_side(config: dict[str, Any]) -> int:
    """Return the patches of a block's side."""
    if "spatial_merge_size" in config or config["vision_config"]["model_type"] == "pixtral":
        return int(config.get("spatial_merge_size", 1))
    if "llava" in config["model_type"] or config["model_type"] == "paligemma":
        return 1
    if "pixel_shuffle_ratio" in config["vision_config"]:
        return int(1 / config["vision_config"]["pixel_shuffle_ratio"])
    if "downsample_ratio" in config:
        return int(1 / config["downsample_ratio"])
    if "downsample_factor" in config:
        return int(config["downsample_factor"])
    if "scale_factor" in config:
        return int(config["scale_factor"])
    vision = config["vision_config"]
    if config["model_type"] == "ovis2":
        return int(vision.get("hidden_stride", 1))
    if "scale_factor" in vision:
        return int(vision["scale_factor"])
    return int(vision["image_size"] // vision["patch_size"] / config["mm_tokens_per_image"] ** 0.5)


def features(model: Any, given: dict[str, Any]) -> np.ndarray:
    """Return embeddings of the prompt's pictures, as the decoder's first layer gets them, with their deepstack features beside them."""
    names = (
        "pixel_values",
        "pixel_attention_mask",
        "image_grid_thw",
        "image_position_ids",
        "image_sizes",
        "image_merge_sizes",
        "spatial_shapes",
        "target_sizes",
    )
    if model.config.model_type == "llama4":
        whole = model.get_image_features(given["pixel_values"], return_dict=True).last_hidden_state
        return model.multi_modal_projector(whole.flatten(0, 1)).numpy()
    layers = (
        {"vision_feature_layer": model.config.vision_feature_layer} if model.config.model_type == "vipllava" else {}
    )
    made = model.model.get_image_features(**{name: given[name] for name in names if name in given}, **layers)
    main = made.pooler_output
    if model.config.model_type == "ovis2":
        marks, ids = model.config.visual_indicator_token_ids, given["input_ids"][0].tolist()
        rows = iter(main.flatten(0, 1))
        own = [each for each in ids if each in (model.config.image_token_id, *marks)]
        vectors = made.visual_indicator_features
        return torch.stack([vectors[marks.index(each)] if each in marks else next(rows) for each in own]).numpy()
    main = torch.cat(list(main)) if isinstance(main, list | tuple) else main.flatten(0, -2)
    if model.config.model_type in ("granite_docling", "hyperclovax_vision_v2"):
        main = main * model.config.text_config.embedding_multiplier
    deep = [torch.cat(list(level)) for level in getattr(made, "deepstack_features", None) or []]
    return torch.cat([main, *deep], dim=-1).numpy()


def greedy(model: Any, given: dict[str, Any]) -> tuple[np.ndarray, torch.Tensor]:
    """Return the tokens after a prompt, and their logits (24, V)."""
    out = model.generate(
        **given,
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        eos_token_id=None,
        pad_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences[0, given["input_ids"].shape[1] :].numpy().astype(np.int32), torch.cat(out.logits)


def see_images_within_windows() -> None:
    """Let Gemma 4 12B see images whole in layers with a window only, within it, as Gemma 4 does.

    In transformers 5.23 its masks do so for caches of one size only; https://github.com/vllm-project/vllm/pull/47217 has what the published
    model does.
    """
    plain = modeling_gemma4_unified.create_masks_for_generate

    def masks(block_sequence_ids: torch.Tensor | None = None, **given: Any) -> Any:
        if block_sequence_ids is None:
            return plain(**given)
        return modeling_gemma4_unified.create_masks_for_vision_model(block_sequence_ids=block_sequence_ids, **given)

    modeling_gemma4_unified.create_masks_for_generate = masks


@torch.no_grad()
def golden(folder: Path, tiny: VisionCheckpoint) -> tuple[dict[str, np.ndarray], float, float, int]:
    """Return the arrays of golden.npz, the least distance of two best logits, how much other pictures change them, and the least
    number of tokens of a reply that other pictures change."""
    model, processor, default = load(folder), make_processor(folder, tiny), make_processor(folder, tiny, None)
    assert "Torchvision" in str(type(default.image_processor).__mro__), "the default that the documentation names"
    pictures = [picture(*size, seed) for seed, size in enumerate(SIZES)]
    arrays, gap, moved, changed = {}, np.inf, np.inf, NUM_TOKENS
    for index, each in enumerate(pictures):
        given = inputs(processor, "{}", tiny, [each])
        arrays[f"pixels_{index}"] = patches(given, tiny.config, tiny.processor)
        arrays[f"features_{index}"] = features(model, given)
        found = patches(inputs(default, "{}", tiny, [each], is_default=True), tiny.config, tiny.processor)
        arrays[f"default_{index}"] = found.astype(np.int16) - arrays[f"pixels_{index}"]
    for count, (text, chosen) in PROMPTS.items():
        given = inputs(processor, text, tiny, [pictures[index] for index in chosen])
        given.pop("pixels", None)
        ids = given["input_ids"]
        logits = model(**given).logits[0, -NUM_LOGITS:]
        outputs, scores = greedy(model, given)
        best = torch.topk(scores, 2).values
        gap = min(gap, float((best[:, 0] - best[:, 1]).min()))
        others = {**given, "pixel_values": given["pixel_values"].flip(-1)}
        moved = min(moved, float((model(**others).logits[0, -NUM_LOGITS:] - logits).abs().max()))
        changed = min(changed, int((greedy(model, others)[0] != outputs).sum()))
        arrays[f"ids_{count}"] = ids[0].numpy().astype(np.int32)
        arrays[f"logits_{count}"] = logits.numpy()
        arrays[f"outputs_{count}"] = outputs
        if hasattr(model.model, "get_rope_index"):
            kinds = [] if "thinker_config" in tiny.config else [given["mm_token_type_ids"]]
            grids = {"image_grid_thw": given["image_grid_thw"], "attention_mask": given["attention_mask"]}
            found, delta = model.model.get_rope_index(ids, *kinds, **grids)
            arrays |= {f"positions_{count}": found[:, 0].numpy().astype(np.int32), f"delta_{count}": delta[0].numpy()}
    return arrays, gap, moved, changed


def published_name(name: str) -> str:
    """Return the name that Kimi K2.5 was published with: transformers saves some tensors under names between that and its own."""
    name = name.removeprefix("model.") if ".mm_projector." in name else name
    return name.replace("language_model.model.blocks.", "language_model.model.layers.").replace(
        "vision_tower.encoder.patch_embed.", "vision_tower.patch_embed."
    )


def make(name: str) -> None:
    """Write the files of one folder."""
    folder, tiny = DATA / name, read_checkpoint(name)
    hf = tiny.config
    generation = {"bos_token_id": BOS, "eos_token_id": EOS}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    save_tokenizer(folder, tiny)
    config = transformers.AutoConfig.from_pretrained(folder)
    is_omni = "thinker_config" in hf
    config, hf_own = (config.thinker_config, hf["thinker_config"]) if is_omni else (config, hf)
    others = {hf_own.get(f"{kind}_token_id") for kind in ("image", "audio", "video")}
    for seed in range(60):
        model = text_class(hf)._from_config(config, dtype=torch.float32)
        random_weights(model, seed)
        random_tower(model, seed)
        scratch = folder / "saved"
        model.to(torch.bfloat16).save_pretrained(scratch)
        tensors = load_file(scratch / "model.safetensors")
        if is_omni:
            tensors = {f"thinker.{name.removeprefix('thinker.')}": tensor for name, tensor in tensors.items()}
            tensors |= {f"{part}.norm.weight": torch.zeros(4) for part in SPEECH}
        save_file({published_name(name): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
        shutil.rmtree(scratch)
        arrays, gap, moved, changed = golden(folder, tiny)
        replies = [set(arrays[f"outputs_{count}"].tolist()) for count in PROMPTS]
        distinct, is_text = min(map(len, replies)), not others & set.union(*replies)
        print(f"{name}: seed {seed}, gap {gap:.4f}, pictures move logits by {moved:.2f} and change {changed} tokens")
        if gap >= MIN_GAP and moved >= MIN_MOVED and changed and distinct >= 6 and is_text:
            break
    else:
        raise SystemExit(f"{name}: no seed will do")
    np.savez_compressed(folder / "golden.npz", **arrays)
    print({key: array.shape for key, array in arrays.items()}, sum(file.stat().st_size for file in folder.iterdir()))


def main() -> None:
    """Write the folders named on the command line, or all."""
    torch.set_num_threads(1)
    see_images_within_windows()
    transformers.utils.logging.disable_progress_bar()
    for name in sys.argv[1:] or processors():
        make(name)


if __name__ == "__main__":
    main()
