"""Modules beside the commands: for other programs of the project, and flags of `bench`."""
