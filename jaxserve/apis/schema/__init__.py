"""Request and reply shapes of the HTTP API."""
