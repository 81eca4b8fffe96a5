"""jaxserve: a JAX-native LLM inference server for TPU, GPU and CPU."""

__version__ = "0.1.0"
