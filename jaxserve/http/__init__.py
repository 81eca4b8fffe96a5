"""The HTTP server: connections, bodies, authentication, errors and routes."""
