"""Assigns the pages of the KV pool to requests. Pure Python, no jax: the pages themselves lie in `runner`."""
