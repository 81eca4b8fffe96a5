"""Makes the two tiny tokenizers in tests/fixtures/tokenizers/. Needs the `tokenizers` package only.

    python tests/tools/make_tokenizer_fixtures.py

byte_level: byte-level BPE, 384 tokens, ChatML control tokens and template, digits one by one.
sentencepiece: SentencePiece-style BPE with byte fallback, 400 tokens, BOS before plain prompts.
Ids are stable: training is deterministic and the text below is fixed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

OUT = Path(__file__).parents[1] / "fixtures" / "tokenizers"

TEXT = [
    "The quick brown fox jumps over the lazy dog and then the dog sleeps.",
    "Once upon a time there was a small server that answered every question.",
    "def add(left, right):\n    return left + right\n",
    "What is the capital of France? The capital of France is Paris.",
    "It was the best of times, it was the worst of times, it was the age of wisdom.",
    "Numbers: 0 1 2 3 4 5 6 7 8 9, and then 10, 11, 12.",
    "Où est la bibliothèque? Das schöne Mädchen läuft über die Straße.",
    "The user asks and the assistant answers; the system says how.",
    "If the weather is good, we will go to the mountains and the sea.",
    "She sells sea shells on the sea shore; the shells she sells are sea shells, for sure.",
]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
INSTRUCT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)


def make_byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def make_sentencepiece() -> Tokenizer:
    special = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    learned = Tokenizer(models.BPE(unk_token="<unk>"))
    learned.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=400 - 3 - 256, special_tokens=[], show_progress=False)
    learned.train_from_iterator(TEXT, trainer)
    model = json.loads(learned.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    vocab = {token: index for index, token in enumerate([*special, *byte_tokens, *pieces])}
    merges = [(left, right) for left, right in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def write(name: str, tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    directory = OUT / name
    directory.mkdir(parents=True, exist_ok=True)
    compact = json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":"))
    (directory / "tokenizer.json").write_text(compact + "\n", encoding="utf-8")
    text = json.dumps(config, ensure_ascii=False, indent=2)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def main() -> None:
    write(
        "byte_level",
        make_byte_level(),
        {
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": CHATML,
        },
    )
    write(
        "sentencepiece",
        make_sentencepiece(),
        {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "clean_up_tokenization_spaces": False,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": INSTRUCT,
        },
    )


if __name__ == "__main__":
    main()
