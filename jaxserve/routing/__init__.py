"""Chooses the replica of each request: policies, and what a router knows of its replicas. Pure Python; no jax, ray or HTTP."""
