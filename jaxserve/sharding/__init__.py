"""The device mesh, and the one table from logical to mesh axes."""
