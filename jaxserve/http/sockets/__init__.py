"""Sockets of the server beside plain listening: the operator's, TLS, and connections that move between processes."""
