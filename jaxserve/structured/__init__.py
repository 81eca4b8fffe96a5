"""Constrained decoding: checks grammars, and makes the masks of the tokens that may come next. No jax."""
