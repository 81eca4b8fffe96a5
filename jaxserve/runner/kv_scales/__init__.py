"""Scales of a KV cache in int8, measured with the model's own weights."""
