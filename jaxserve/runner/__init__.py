"""Turning step plans into calls of precompiled programs. Holds the only `jax.jit` of the server."""
