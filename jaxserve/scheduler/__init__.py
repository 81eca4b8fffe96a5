"""Which tokens run in the next step. Pure Python over a state, events and a clock; no jax."""
