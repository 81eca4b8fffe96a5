"""Speculative decoding after images: an MTP layer reads what the model reads, a draft model takes their tokens for text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxserve.config import ImagesConfig
from jaxserve.frontend.images.positions import image_spans, mrope_positions
from tests.engine.image_reader import SIZES, Reader, limits
from tests.engine.model_engine import ModelEngine, request
from tests.engine.test_image_steps import begin_reply, finish, joined, plans_of
from tests.models.goldens import golden_checkpoint
from tests.models.image_drafters import gemma4_assistant, glm_ocr_with_layer
from tests.models.image_predictor import PLAIN, NumpyPredictor, with_predictor
from tests.models.pictures import picture
from tests.models.vision_model import VisionModel, process

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("speculates")]  # real models
NUM_DRAFTS = 3


@dataclass
class Predicted:
    """An engine with an MTP layer, and the layer in NumPy."""

    path: Path
    reader: Reader


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Predicted]:
    path = with_predictor(tmp_path_factory.mktemp("predictor") / "model")
    sizes = limits(PLAIN.name) | {"max_num_batched_tokens": 128}
    engine = ModelEngine(path, speculative_method="mtp", num_speculative_tokens=NUM_DRAFTS, **sizes)
    yield Predicted(path, Reader(engine, PLAIN.name))
    engine.close()


def check_tokens(reader: Reader, chunk: int = 16) -> None:
    """Check that speculation changes no token, for requests alone, together, in chunks and found in the prefix cache.

    chunk: tokens of a step that has parts of a prompt.
    """
    engine, text = reader.engine, request("text", list(range(20, 60)))
    engine.restart(max_burst_ms=0.0)
    expected = {"one": reader.expected(1), "three": reader.expected(3), "text": engine.run([text])["text"].token_ids}
    assert engine.num_draft_tokens == 0
    messages = [reader.request("one", 1), reader.request("three", 3), text]
    for options in ({}, {"overlap": False}, {"max_num_batched_tokens": chunk}):
        engine.restart(num_speculative_tokens=NUM_DRAFTS, **options)  # type: ignore[arg-type]
        for _ in range(2):
            for message in messages:
                assert engine.run([message])[message.request_id].token_ids == expected[message.request_id]
        assert engine.num_draft_tokens > 20
        together = engine.run(messages[1:])
        assert {name: each.token_ids for name, each in together.items()} == {n: expected[n] for n in ("three", "text")}
    assert engine.executor.compilations()["serving"] == 0


def test_an_mtp_layer_after_images_changes_no_token(predicted: Predicted) -> None:
    check_tokens(predicted.reader)


def test_the_last_token_of_a_prompt_is_computed_as_one_of_its_image(predicted: Predicted) -> None:
    """The prompt ends with its image, and its last step computes one token: alone, and beside a reply with drafts, for which it is
    encoded once more."""
    reader, engine = predicted.reader, predicted.reader.engine
    prompt = reader.golden["ids_1"].tolist()
    prompt = prompt[: len(prompt) - prompt[::-1].index(reader.processor.image_token_id)]
    prompt = [*range(30, 30 + (1 - len(prompt)) % 32), *prompt]
    image = reader.request_of("image", prompt, [picture(*SIZES[0], 0)], reader.processor)
    text = request("text", list(range(20, 60)), max_tokens=100)
    engine.restart(max_burst_ms=0.0)
    expected = {message.request_id: engine.run([message])[message.request_id].token_ids for message in (image, text)}
    engine.restart(num_speculative_tokens=NUM_DRAFTS, max_num_batched_tokens=16)
    plans = plans_of(engine)
    assert engine.run([image])["image"].token_ids == expected["image"]
    engine.scheduler._images.forget()
    outputs = begin_reply(engine, text) + engine.core.handle(image)
    assert joined(outputs + finish(engine)) == expected
    with_images = [plan for plan in plans if plan.image_rows is not None]
    assert sum(plan.num_tokens <= 2 for plan in with_images) == 2
    assert {plan.kind for plan in with_images} == {"mixed"}
    assert sum(plan.kind == "speculate" for plan in plans) > 40


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [1, 3])
def test_drafts_after_images_are_those_of_the_layer_in_numpy(predicted: Predicted, count: int) -> None:
    """The control: without the images' embeddings, or with plain positions, the layer's logits are others."""
    reader, engine = predicted.reader, predicted.reader.engine
    right = numpy_drafts(predicted.path, reader, count)
    for controls in ({"has_images": False}, {"has_rope": False}):
        other = numpy_drafts(predicted.path, reader, count, **controls)
        assert np.abs(other[1][0] - right[1][0]).max() > 0.05, controls
    best = np.sort(np.stack(right[1]))[:, -2:]
    assert (best[:, 1] - best[:, 0]).min() > 1e-3, "no two tokens are as good as equal"
    prompt = reader.golden[f"ids_{count}"]
    state = engine.executor._runner._state
    for _ in range(2):
        engine.restart(num_speculative_tokens=NUM_DRAFTS)
        assert state.arrays.drafts is not None
        empty = jax.device_put(np.zeros(state.arrays.drafts.shape, np.int32), state.arrays.drafts.sharding)
        state.arrays = state.arrays._replace(drafts=empty)
        engine.run([reader.request("one", count, max_tokens=2)])
        assert state.arrays.drafts is not None
        rows = np.asarray(state.arrays.drafts)
        assert [row[1:].tolist() for row in rows if row[0] == len(prompt) + 1] == [right[0]]


def numpy_drafts(
    path: Path, reader: Reader, count: int, *, has_images: bool = True, has_rope: bool = True
) -> tuple[list[int], list[np.ndarray]]:
    """Return the drafts after the first two tokens of a golden's reply, and the logits that they are chosen by."""
    prompt, model = reader.golden[f"ids_{count}"], VisionModel(path)
    items = [item for index in {1: (0,), 3: (2, 0, 1)}[count] for item in process(path, index).items]
    rows = model.encode(items, sum(len(item.patches) for item in items))
    outputs = model.run(prompt, items, rows, 2)[1]
    layer = NumpyPredictor(path)
    known = np.concatenate([prompt, outputs])
    embeddings = layer.embed(known)
    if has_images:
        embeddings[known == model.vision.image_token_id] = np.concatenate(rows)
    spans = image_spans(prompt, model.vision.image_token_id, [item.num_tokens for item in items])
    rope, delta = mrope_positions(len(prompt), spans, [item.grid for item in items], model.vision.merge)
    hidden, following, tokens, all_logits = model.hidden, embeddings[1:], [], []
    for _ in range(NUM_DRAFTS):
        after = np.tile(np.arange(len(prompt), len(hidden)) + delta, (3, 1))
        places = np.concatenate([rope, after], 1) if has_rope else np.tile(np.arange(len(hidden)), (3, 1))
        made = layer(following, hidden, places)[-1:]
        all_logits.append(layer.logits(made)[0])
        tokens.append(int(all_logits[-1].argmax()))
        hidden, following = (
            np.concatenate([hidden, made]),
            np.concatenate([following, layer.embed(np.array(tokens[-1:]))]),
        )
    return tokens, all_logits


@pytest.mark.exhaustive
def test_the_layer_of_glm_ocr_after_images_changes_no_token(tmp_path: Path) -> None:
    path = glm_ocr_with_layer(tmp_path / "model")
    sizes = limits("glm_ocr_tiny") | {"max_num_batched_tokens": 64}
    engine = ModelEngine(path, speculative_method="mtp", num_speculative_tokens=NUM_DRAFTS, **sizes)
    check_tokens(Reader(engine, "glm_ocr_tiny"))
    engine.close()


@pytest.mark.parametrize(
    "name",
    [
        "gemma4_vision_tiny",
        pytest.param("gemma4_vision_odd_tiny", marks=pytest.mark.exhaustive),
        pytest.param("gemma4_unified_vision_tiny", marks=pytest.mark.exhaustive),
    ],
)
def test_a_drafter_of_gemma_4_after_images_changes_no_token(name: str, tmp_path: Path) -> None:
    """Images that are seen whole in layers with a window, per-layer embeddings, and images without an encoder. An image fills most of a step."""
    target = Reader(None, name).path  # type: ignore[arg-type]
    draft = gemma4_assistant(tmp_path / "drafter", target)
    sizes = limits(name) | {"max_num_batched_tokens": 128}
    engine = ModelEngine(target, draft_model=draft, num_speculative_tokens=NUM_DRAFTS, **sizes)
    check_tokens(Reader(engine, name), chunk=limits(name)["max_num_batched_tokens"])
    engine.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["qwen3_vl_tiny", "gemma3_vision_tiny"])
def test_a_draft_model_that_reads_no_images_changes_no_token(name: str) -> None:
    """Positions in three dimensions, and images that are seen whole."""
    draft = golden_checkpoint("mistral_sliding_tiny").path
    engine = ModelEngine(Reader(None, name).path, draft_model=draft, num_speculative_tokens=NUM_DRAFTS, **limits(name))  # type: ignore[arg-type]
    check_tokens(Reader(engine, name))
    engine.close()


@pytest.mark.exhaustive
def test_the_model_itself_as_a_draft_model_is_right_after_texts() -> None:
    """It takes tokens of images for text, so its drafts after images may be wrong: those are compared above, and no image is served here."""
    name = "qwen3_vl_tiny"
    path, images = Reader(None, name).path, ImagesConfig(limit_mm_per_prompt="image=0")  # type: ignore[arg-type]
    engine = ModelEngine(path, draft_model=path, num_speculative_tokens=NUM_DRAFTS, images=images, **limits(name))
    engine.restart(num_speculative_tokens=NUM_DRAFTS)
    engine.run([request("text", list(range(20, 60)))])
    assert engine.num_accepted_tokens == engine.num_draft_tokens > 10
    engine.close()
