"""The decoder's layer, and blocks that some families add to it or compute beside it."""
