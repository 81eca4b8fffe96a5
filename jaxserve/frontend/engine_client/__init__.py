"""The API process's client of the engine: connection, submitted requests, outputs and commands."""
