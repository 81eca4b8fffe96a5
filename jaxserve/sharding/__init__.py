"""The device mesh, the table from logical to mesh axes, and collectives written by hand."""
