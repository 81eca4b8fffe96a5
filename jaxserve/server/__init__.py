"""The API process: HTTP in, engine messages out, SSE back. Never imports jax."""
