"""Simulates fleets of replicas: discrete events through the real scheduler, engine loop, KV cache and routing policies.

See docs/simulator.md.
"""
