"""Text to token ids and back: encoding, chat templates, incremental detokenization. No jax."""
