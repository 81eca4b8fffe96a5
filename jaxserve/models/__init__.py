"""Decoder and encoder modules, and the model families that describe checkpoints as `model_config` data."""
