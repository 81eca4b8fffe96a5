"""The processors and the memory of this host, within the limits of its control groups."""
