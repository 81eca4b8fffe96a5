"""Embeddings in place of a prompt's tokens: file formats, limits, and their parts as they cross to the engine."""
