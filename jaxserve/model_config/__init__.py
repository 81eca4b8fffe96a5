"""Model architectures as plain data: what a family reads from `config.json`, and what layers and sharding are built from.

Nothing here imports jax or another package of jaxserve. Code branches on these features, never on model names.
"""
