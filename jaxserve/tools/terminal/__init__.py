"""What `jaxserve chat` and `jaxserve complete` do once their flags are read."""
