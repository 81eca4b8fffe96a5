"""Several models in one server: their settings, their share of the devices, and their engines."""
