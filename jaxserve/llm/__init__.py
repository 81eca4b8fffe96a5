"""The Python API: an engine process of one's own, without HTTP. Import its names from `jaxserve`."""
