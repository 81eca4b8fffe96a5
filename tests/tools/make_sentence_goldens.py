"""Write tiny models as sentence-transformers saves them, and what it makes of texts: tests/models/data/encoders/NAME.

Run from the repository root where torch, transformers and sentence-transformers are installed:
    python tests/tools/make_sentence_goldens.py [NAME ...]
Without names, all are written. Everything is computed in float32, one text at a time, so that no padding is involved.

golden.npz of a model that embeds: ids_i (T) int32 and vectors (texts, D), as the last module makes them. Of one that scores:
ids_i, and scores (texts) before any sigmoid. Of a classifier: ids_i, logits (texts, labels), and probabilities (SENTENCES,
labels), as transformers' pipeline makes them.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

DATA = Path(__file__).parents[1] / "models" / "data" / "encoders"
WORDS = "the quick brown fox jumps over lazy dog a server answers many requests at once each is list of tokens yes no"
VOCAB = 285
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
LENGTHS = (1, 2, 7, 30, 47)

Modules = list[torch.nn.Module]
Case = tuple[str, dict[str, Any], Callable[[int], Modules]]
"""Name of transformers' model, its config, and the modules after it by its width."""


def mean(width: int) -> Modules:
    """Average and normalise."""
    return [Pooling(width, "mean"), Normalize()]


def gemma(window: int, **sizes: Any) -> dict[str, Any]:
    """EmbeddingGemma's text model: Gemma 3 whose tokens attend in both directions."""
    return {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": window,
        "use_bidirectional_attention": True,
        "max_position_embeddings": 64,
        **sizes,
    }


def modernbert(window: int, **sizes: Any) -> dict[str, Any]:
    """ModernBERT with two layers in three that have windows."""
    control = {"cls_token_id": 0, "sep_token_id": 2}
    return {"num_hidden_layers": 4, "local_attention": window, "max_position_embeddings": 64, **control, **sizes}


MODERNBERT_ODD = modernbert(
    7,
    hidden_size=40,
    intermediate_size=56,
    num_attention_heads=5,
    norm_bias=True,
    attention_bias=True,
    mlp_bias=True,
    hidden_activation="silu",
    rope_parameters={
        "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    },
)

BERT: dict[str, Any] = {"intermediate_size": 56, "num_hidden_layers": 2, "hidden_dropout_prob": 0.0}
MPNET: dict[str, Any] = {
    "hidden_size": 40,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
    "attention_probs_dropout_prob": 0.0,
    **BERT,
}

CASES: dict[str, Case] = {
    "embedding_gemma_tiny": (
        "Gemma3TextModel",
        gemma(8, hidden_size=48, intermediate_size=56, num_attention_heads=3, num_key_value_heads=1, head_dim=40),
        lambda width: [
            Pooling(width, "mean"),
            Dense(width, 72, bias=False, activation_function=torch.nn.Identity()),
            Dense(72, width, bias=False, activation_function=torch.nn.Identity()),
            Normalize(),
        ],
    ),
    "embedding_gemma_odd_tiny": (
        "Gemma3TextModel",
        gemma(7, hidden_size=40, intermediate_size=48, num_attention_heads=5, num_key_value_heads=5, head_dim=24),
        lambda width: [
            Pooling(width, "lasttoken"),
            Dense(width, 20),
            Dense(20, 16, activation_function=torch.nn.GELU()),
        ],
    ),
    "modernbert_tiny": (
        "ModernBertModel",
        modernbert(12, hidden_size=48, intermediate_size=40, num_attention_heads=3),
        lambda width: [Pooling(width, "cls")],
    ),
    "modernbert_odd_tiny": ("ModernBertModel", MODERNBERT_ODD, mean),
    "eurobert_tiny": (
        "EuroBertModel",
        {
            "hidden_size": 48,
            "intermediate_size": 40,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "num_hidden_layers": 2,
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 250000.0},
        },
        mean,
    ),
    "qwen2_both_ways_tiny": (
        "Qwen2Model",
        {
            "is_causal": False,
            "hidden_size": 40,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
        },
        lambda width: [Pooling(width, "lasttoken"), Normalize()],
    ),
    "embedding_gemma2_tiny": (
        "EmbeddingGemma2TextModel",
        {
            "hidden_size": 40,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "global_head_dim": 24,
            "num_global_key_value_heads": 1,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "sliding_window": 4,
            "hidden_size_per_layer_input": 8,
            "embedding_dim": 24,
            "max_position_embeddings": 64,
        },
        mean,
    ),
    "mpnet_tiny": ("MPNetModel", MPNET, mean),
    "distilbert_tiny": (
        "DistilBertModel",
        {"dim": 48, "hidden_dim": 40, "n_heads": 3, "n_layers": 2, "max_position_embeddings": 64},
        lambda width: [Pooling(width, "mean"), Dense(width, 20)],
    ),
    "nomic_bert_tiny": (
        "NomicBertModel",
        {"num_attention_heads": 3, "max_position_embeddings": 64, "hidden_size": 48, **BERT},
        mean,
    ),
    "gte_tiny": (
        "GteModel",
        {"num_attention_heads": 5, "max_position_embeddings": 64, "hidden_size": 40, **BERT},
        lambda width: [Pooling(width, "cls"), Normalize()],
    ),
}
QWEN3: dict[str, Any] = {
    "hidden_size": 40,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
TEMPLATE = """<s>judge{% for message in messages %}{% if message.role == 'query' %} q {{ message.content }}{% endif %}\
{% if message.role == 'document' %} d {{ message.content }}{% endif %}{% endfor %}</s>"""
"""A chat template with the roles that sentence-transformers gives the texts of a pair."""

SCORERS: dict[str, tuple[str, dict[str, Any]]] = {
    "modernbert_cross_tiny": (
        "ModernBertForSequenceClassification",
        modernbert(12, hidden_size=48, intermediate_size=40, num_attention_heads=3),
    ),
    "modernbert_cross_odd_tiny": (
        "ModernBertForSequenceClassification",
        {**MODERNBERT_ODD, "classifier_pooling": "mean", "classifier_bias": True, "classifier_activation": "silu"},
    ),
    "mpnet_cross_tiny": ("MPNetForSequenceClassification", MPNET),
    "distilbert_cross_tiny": (
        "DistilBertForSequenceClassification",
        {"dim": 40, "hidden_dim": 48, "n_heads": 5, "n_layers": 2, "max_position_embeddings": 64},
    ),
    "gte_cross_tiny": (
        "GteForSequenceClassification",
        {"num_attention_heads": 3, "max_position_embeddings": 64, "hidden_size": 48, "type_vocab_size": 0, **BERT},
    ),
    "qwen3_scores_tiny": ("Qwen3ForSequenceClassification", QWEN3),
}
CLASSIFIERS: dict[str, tuple[str, dict[str, Any]]] = {
    "roberta_topics_tiny": (
        "RobertaForSequenceClassification",
        {
            "hidden_size": 48,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "max_position_embeddings": 64,
            "type_vocab_size": 1,
            "problem_type": "multi_label_classification",
            "id2label": {0: "sports", 1: "weather", 2: "music"},
            "label2id": {"sports": 0, "weather": 1, "music": 2},
        },
    ),
    "modernbert_labels_tiny": (  # with transformers' default of two labels, which config.json does not have
        "ModernBertForSequenceClassification",
        modernbert(12, hidden_size=48, intermediate_size=40, num_attention_heads=3),
    ),
    "qwen3_labels_tiny": ("Qwen3ForSequenceClassification", {**QWEN3, "num_labels": 5}),
}
SENTENCES = ("the quick fox", "a server answers", "lists of tokens, many at once")


def random_weights(model: torch.nn.Module, seed: int) -> None:
    """Weights under which heads attend unevenly and every table counts."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if "norm" in name.lower() and name.endswith("weight"):
            value = (0 if "Gemma" in type(model).__name__ else 1) + 0.2 * noise
        elif name.endswith("bias"):
            value = 0.2 * noise
        elif "embed" in name:
            value = noise
        else:
            value = noise * 1.5 / weight.shape[-1] ** 0.5
        weight.data.copy_(value)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.copy_(1 + 0.2 * torch.randn(buffer.shape, generator=generator))


def write_tokenizer(folder: Path, *words: str) -> None:
    """A byte-level BPE with the special tokens of RoBERTa, and tokens for some words."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS] * 3, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.add_tokens(list(words))
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def write_model(folder: Path, name: str, keys: dict[str, Any], seed: int, *words: str) -> Any:
    """Save transformers' model with a tokenizer, and return it."""
    made = getattr(transformers, name)
    model = made(made.config_class(**{**SIZES, **keys})).eval()
    random_weights(model, seed)
    model.save_pretrained(folder)
    write_tokenizer(folder, *words)
    return model


@torch.no_grad()
def make_sentences(name: str, case: Case, seed: int) -> None:
    """Write one model that embeds."""
    architecture, keys, modules = case
    folder, plain = DATA / name, DATA / f"{name}.plain"
    for each in (folder, plain):
        shutil.rmtree(each, ignore_errors=True)
    plain.mkdir(parents=True)
    model = write_model(plain, architecture, keys, seed)
    width = model.config.hidden_size
    head = modules(width)
    for index, module in enumerate(head):
        random_weights(module, seed + 1 + index)
    SentenceTransformer(modules=[Transformer(str(plain)), *head], device="cpu").save(
        str(folder), create_model_card=False
    )
    shutil.rmtree(plain)
    sentences = SentenceTransformer(str(folder), device="cpu", model_kwargs={"attn_implementation": "eager"})
    rng = np.random.default_rng(seed)
    arrays, vectors = {}, []
    for i, length in enumerate(LENGTHS):
        ids = rng.integers(5, VOCAB, length)
        given = torch.tensor([ids.tolist()])
        features = {"input_ids": given, "attention_mask": torch.ones_like(given)}
        vectors.append(sentences(features)["sentence_embedding"][0].float().numpy())
        arrays[f"ids_{i}"] = ids.astype(np.int32)
    np.savez_compressed(folder / "golden.npz", vectors=np.stack(vectors), **arrays)
    print(name, np.stack(vectors).std(0).mean())


@torch.no_grad()
def make_scores(name: str, case: tuple[str, dict[str, Any]], seed: int) -> None:
    """Write one model that scores texts."""
    architecture, keys = case
    folder = DATA / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_model(folder, architecture, {"num_labels": 1, **keys}, seed)
    model = getattr(transformers, architecture).from_pretrained(folder, attn_implementation="eager").eval()
    rng = np.random.default_rng(seed)
    arrays, scores = {}, []
    for i, length in enumerate(LENGTHS):
        ids = rng.integers(5, VOCAB, length)
        scores.append(float(model(torch.tensor([ids.tolist()])).logits[0, 0]))
        arrays |= {f"ids_{i}": ids.astype(np.int32), f"types_{i}": np.zeros(length, np.int32)}
    np.savez_compressed(folder / "golden.npz", scores=np.asarray(scores, np.float32), **arrays)
    print(name, scores)


@torch.no_grad()
def make_classifier(name: str, case: tuple[str, dict[str, Any]], seed: int) -> None:
    """Write one model that labels texts."""
    architecture, keys = case
    folder = DATA / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_model(folder, architecture, keys, seed)
    model = getattr(transformers, architecture).from_pretrained(folder, attn_implementation="eager").eval()
    rng = np.random.default_rng(seed)
    arrays, logits = {}, []
    for i, length in enumerate(LENGTHS):
        ids = rng.integers(5, VOCAB, length)
        logits.append(model(torch.tensor([ids.tolist()])).logits[0].numpy())
        arrays[f"ids_{i}"] = ids.astype(np.int32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    pipeline = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer, top_k=None, device="cpu")
    by_label = [{each["label"]: each["score"] for each in found} for found in pipeline(list(SENTENCES), batch_size=1)]
    order = [model.config.id2label[i] for i in range(model.config.num_labels)]
    probabilities = [[found[label] for label in order] for found in by_label]
    np.savez_compressed(
        folder / "golden.npz", logits=np.stack(logits), probabilities=np.float32(probabilities), **arrays
    )
    print(name, np.stack(logits).std(0), probabilities)


@torch.no_grad()
def make_reranker(name: str, keys: dict[str, Any], seed: int) -> None:
    """Write one model whose score is the logit of `yes` less that of `no`, as sentence-transformers saves it."""
    folder, plain = DATA / name, DATA / f"{name}.plain"
    shutil.rmtree(folder, ignore_errors=True)
    plain.mkdir(parents=True)
    write_model(plain, "Qwen3ForCausalLM", {**keys, "vocab_size": VOCAB + 2}, seed, "yes", "no")
    (plain / "chat_template.jinja").write_text(TEMPLATE)
    CrossEncoder(str(plain), device="cpu").save_pretrained(str(folder), create_model_card=False)
    shutil.rmtree(plain)
    model = CrossEncoder(str(folder), device="cpu", activation_fn=torch.nn.Identity())
    rng = np.random.default_rng(seed)
    arrays, scores = {}, []
    for i, length in enumerate(LENGTHS):
        ids = rng.integers(5, VOCAB, length)
        given = torch.tensor([ids.tolist()])
        features = {"input_ids": given, "attention_mask": torch.ones_like(given), "modality": "text"}
        scores.append(float(model(features)["scores"][0, 0]))
        arrays |= {f"ids_{i}": ids.astype(np.int32), f"types_{i}": np.zeros(length, np.int32)}
    pairs = [["the quick fox", "jumps over"], ["a server", "answers many requests at once"]]
    arrays["of_texts"] = np.asarray(model.predict(pairs), np.float32)
    np.savez_compressed(folder / "golden.npz", scores=np.asarray(scores, np.float32), **arrays)
    print(name, scores, arrays["of_texts"])


def main() -> None:
    """Write those named, or all."""
    torch.set_num_threads(1)
    for index, (name, case) in enumerate(CASES.items()):
        if not sys.argv[1:] or name in sys.argv[1:]:
            make_sentences(name, case, 40 + 10 * index)
    for index, (name, scorer) in enumerate(SCORERS.items()):
        if not sys.argv[1:] or name in sys.argv[1:]:
            make_scores(name, scorer, 400 + 10 * index)
    for index, (name, classifier) in enumerate(CLASSIFIERS.items()):
        if not sys.argv[1:] or name in sys.argv[1:]:
            make_classifier(name, classifier, 600 + 10 * index)
    if not sys.argv[1:] or "qwen3_reranker_tiny" in sys.argv[1:]:
        make_reranker("qwen3_reranker_tiny", QWEN3, 800)


if __name__ == "__main__":
    main()
