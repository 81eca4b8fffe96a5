"""Endpoints for the operation of the server: health, metrics, commands and the description of the API."""
