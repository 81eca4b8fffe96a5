"""What a GPU makes of jaxserve, in one command and under nine minutes: `python -m benchmarks.gpu`."""
