"""Attention to one vector per token and one for each block of tokens."""
