"""Connects API processes with the engine process: messages, codec, transport, addresses and reports."""
