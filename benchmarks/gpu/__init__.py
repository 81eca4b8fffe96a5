"""Check and measure jaxserve on a GPU, in one command and under nine minutes: `python -m benchmarks.gpu`."""
