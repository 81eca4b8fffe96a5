"""Bytes that compiled steps of large models read and write, against the least that they must, without an accelerator."""
