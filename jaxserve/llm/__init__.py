"""The Python API: a model in an engine process, without HTTP. Import its names from `jaxserve`."""
