"""Checkpoint files as numpy: where a model is, what its headers say, and its tensors one by one. No jax.

Every format presents itself as a Hugging Face checkpoint (names, shapes, `config.json` keys), so that
families, loader and tokenizer know one vocabulary.
"""
