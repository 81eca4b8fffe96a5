"""Decides which tokens the next step computes. Pure Python: no jax, no sockets."""
