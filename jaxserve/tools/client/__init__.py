"""Servers with OpenAI's API, seen from a client."""
