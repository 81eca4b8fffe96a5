"""The programs of `jaxserve chat` and `jaxserve complete`."""
