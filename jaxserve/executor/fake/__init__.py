"""An executor without a model or jax, whose replies are computed from the token ids, for tests."""
