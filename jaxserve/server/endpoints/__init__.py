"""Endpoints: every `Route` in a file here is served."""
