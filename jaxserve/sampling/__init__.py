"""Choosing the next token: `params` is the wire half (no jax), `transforms` and `sampler` the device half."""
