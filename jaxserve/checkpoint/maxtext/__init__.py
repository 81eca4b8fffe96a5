"""Checkpoints of the trainer MaxText, in the Orbax format."""
