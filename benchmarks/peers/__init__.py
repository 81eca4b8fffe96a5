"""Other servers beside jaxserve, under the same load, on the same weights, in one run: `python -m benchmarks.peers`."""
