"""A server under mixed traffic for a long time, with engines and API processes that are killed."""
