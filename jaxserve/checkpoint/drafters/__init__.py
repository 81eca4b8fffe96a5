"""Layers that draft for a model: in its own checkpoint, or published beside it."""
