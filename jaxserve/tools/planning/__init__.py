"""Plans the memory and speed of a model on a device that need not be present (`jaxserve plan`)."""
