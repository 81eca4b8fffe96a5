"""What a model will need on a device that need not be there, before anything is loaded."""
