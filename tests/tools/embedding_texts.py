"""Texts of the embedding references."""

from __future__ import annotations

MINILM_TEXTS = (
    "Hello",
    "a",
    "The quick brown fox jumps over the lazy dog.",
    "A fast auburn fox leapt across a sleepy hound.",
    "JAX compiles array programs with XLA for CPUs, GPUs and TPUs.",
    "How do I bake sourdough bread at home?",
    "Flour, water, salt and time: the four ingredients of a good loaf.",
    "naïve café Über résumé",
    "今天天气很好",
    "unaffable antidisestablishmentarianism 12345 !?",
    "SHOUTING and whispering; (brackets) [square] {curly}",
    " ".join(f"Sentence number {i} of a text that is as long as the model was trained for." for i in range(13)),
)
"""From one word to 223 tokens."""

DECODER_PROMPTS = (
    "Hello",
    "The capital of France is Paris.",
    "Gravity is the force by which a planet draws objects toward its center.",
    " ".join(f"{i} green bottles hanging on the wall," for i in range(12)),
)
