"""Loads a checkpoint's tensors into device arrays, one parameter at a time."""
