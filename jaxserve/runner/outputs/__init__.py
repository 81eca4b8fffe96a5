"""Speculative decoding with a draft model: the programs."""
