"""Recurrent mixers, one kind a module; `layers.mixers` applies them to the states in the cache."""
