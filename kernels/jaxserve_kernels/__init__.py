"""Attention and other device kernels of jaxserve: one folder per op. Imports jax only."""
