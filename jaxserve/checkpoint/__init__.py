"""Checkpoint files as numpy: finding a model, its headers, and its tensors one by one. No jax.

Every format presents itself as a Hugging Face checkpoint (names, shapes, `config.json` keys), so that
families, loader and tokenizer handle one vocabulary.
"""
